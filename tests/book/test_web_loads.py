"""What counts as a load from a network, and that no lock file names a registry."""

from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from web_loads import loads

BOOK = Path(__file__).resolve().parents[2] / "chapters/book"


@pytest.mark.parametrize("source", [
    '<script async src="https://cdn.example/require.js"></script>', '<img src="//a.example/b.png">',
    '<link rel="stylesheet" href="http://a.example/b.css">', '<p style="background:url(//a.b/c)">',
    '<style>@import "https://a.example/b.css";</style>',
    '<style>@font-face { src: url( "https://a.example/b.woff2" ) }</style>'])
def test_a_load_from_a_network_is_found(source):
    assert list(loads(BeautifulSoup(source, "html.parser")))


@pytest.mark.parametrize("source", [
    '<a href="https://a.example/">there</a>', '<img src="_images/a.png">',
    '<link rel="canonical" href="https://a.example/">', '<style>a { fill: url(#b) }</style>'])
def test_a_link_to_follow_is_no_load(source):
    assert not list(loads(BeautifulSoup(source, "html.parser")))


def test_the_lock_file_names_no_registry():
    lock = (BOOK / "package-lock.json").read_text()
    assert "resolved" not in lock and "://" not in lock
