"""Sick jobs by their fault, run once for all tests that read them."""

import functools
import io
import re
from contextlib import redirect_stdout


@functools.cache
def seeds_of(drill, fault, count=1):
    """The first seeds whose job has this fault."""
    found = (seed for seed in range(1, 10_000) if drill(seed)._fault is fault)
    return [next(found) for _ in range(count)]


@functools.cache
def _readings_of(drill, seed):
    job = drill(seed)
    return job._run(job._sick_part())


def job_of(drill, seed):
    """A job that has run already."""
    job = drill(seed)
    job._readings = _readings_of(drill, seed)
    return job


def first_job_of(drill, fault):
    return job_of(drill, *seeds_of(drill, fault))


def healthy_run_of(drill, fault):
    """The first job with this fault, and the readings of its healthy part."""
    job = drill(*seeds_of(drill, fault))
    return job, job._run(job._healthy)


def faults_of(drill, slug):
    return next(case.faults for case in drill.cases if case.slug == slug)


def fitting(drill, readings):
    return [suspect.name for suspect in drill.suspects_known if suspect.finding(readings)[0]]


def said_by(call, *args, **options):
    said = io.StringIO()
    with redirect_stdout(said):
        call(*args, **options)
    return said.getvalue()


def words_of(text):
    return set(re.findall(r"[\w-]+", text.lower()))


def words_of_suspects(drill):
    return {word for suspect in drill.suspects_known for word in suspect.name.split()}
