"""What a web page loads from another host. A link for people to follow is no load."""

import re

# The attributes by which an element of a page loads something.
LOADS = {"script": ["src"], "img": ["src", "srcset"], "source": ["src", "srcset"],
         "iframe": ["src"], "video": ["src", "poster"], "audio": ["src"], "object": ["data"],
         "embed": ["src"], "track": ["src"], "input": ["src"], "image": ["href", "xlink:href"],
         "use": ["href"]}
LINKS_THAT_LOAD = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "manifest"}
FOREIGN = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
IN_CSS = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


def loads(soup):
    """What a page loads from another host."""
    for element in soup.find_all(LOADS):
        for name in LOADS[element.name]:
            if FOREIGN.match(element.get(name) or ""):
                yield element[name]
    for link in soup.find_all("link"):
        if LINKS_THAT_LOAD & set(link.get("rel") or []) and FOREIGN.match(link.get("href") or ""):
            yield link["href"]
    for element in soup.find_all(style=True):
        yield from in_css(element["style"])
    for style in soup.find_all("style"):
        yield from in_css(style.text)


def in_css(text):
    """What a style sheet loads from another host."""
    return IN_CSS.findall(text)
