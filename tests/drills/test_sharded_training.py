"""Chapter 08's sick jobs, beyond what test_each_job.py holds each to."""

import pytest
from drill_jobs import faults_of, fitting, healthy_run_of
from symptoms import symptoms_of

from dplab.drills.sharded_training import ShardedTraining


@pytest.mark.slow
@pytest.mark.parametrize("slug", "ac")
def test_the_mended_part_trains_what_one_process_does_and_holds_its_own(slug):
    _, readings = healthy_run_of(ShardedTraining, faults_of(ShardedTraining, slug)[0])
    assert fitting(ShardedTraining, readings) == []
    assert symptoms_of(readings) == {"equal losses", "equal ranks"}
    for rank in readings.ranks:
        assert rank.adam == 8 * rank.own + 4, "two moments and a counter"
        assert rank.behind == 4 * rank.own
        assert len(set(rank.factors)) > 1 and all(factor < 1 for factor in rank.factors)
        assert len(set(rank.calls)) == 1, "every step calls the same"
