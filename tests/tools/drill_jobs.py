"""Sick jobs by their fault, run once for all tests that read them."""

import functools
import io
import re
from contextlib import redirect_stdout


@functools.cache
def seeds_of(drill, fault, count):
    """The first seeds whose job has this fault."""
    found = (seed for seed in range(1, 10_000) if drill(seed)._fault is fault)
    return [next(found) for _ in range(count)]


@functools.cache
def job_of(drill, seed):
    job = drill(seed)
    job._readings = job._run(job._fault.sick)
    return job


def first_job_of(drill, fault):
    return job_of(drill, seeds_of(drill, fault, 1)[0])


def fitting(drill, readings):
    return [suspect.name for suspect in drill.suspects_known if suspect.finding(readings)[0]]


def said_by(*readings):
    said = io.StringIO()
    with redirect_stdout(said):
        for reading in readings:
            reading()
    return said.getvalue()


def words_of(text):
    return set(re.findall(r"[\w-]+", text.lower()))


def words_of_suspects(drill):
    return {word for suspect in drill.suspects_known for word in suspect.name.split()}
