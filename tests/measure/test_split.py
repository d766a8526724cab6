"""A step's time by rank, in four kinds that add up; and collectives from the last launch on."""


from dplab.measure import from_last_launch, split_time
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span

# Rank 0 launches at 3 and at 6; rank 1 computes longer, and launches at 5 and at 8.
RANKS = [
    [Span("data", STALLED, 0, 1), Span("backward", COMPUTE, 1, 4),
     Span("all_reduce", COMMUNICATION, 3, 7), Span("all_reduce", COMMUNICATION, 6, 10)],
    [Span("backward", COMPUTE, 0, 8), Span("all_reduce", COMMUNICATION, 5, 7),
     Span("all_reduce", COMMUNICATION, 8, 10), Span("optimizer", COMPUTE, 11, 12)]]


def test_each_moment_is_of_one_kind():
    assert split_time(RANKS) == [
        {"computing": 3, "exposed": 4, "waiting": 2, "idle": 3},  # idle: 0 to 1 and 10 to 12
        {"computing": 9, "exposed": 2, "waiting": 0, "idle": 1}]


def test_before_the_last_launch_a_rank_waits():
    first, second = from_last_launch(RANKS)
    assert [(span.lane, span.start, span.end) for span in first if span.name == "all_reduce"] == [
        (STALLED, 3, 5), (COMMUNICATION, 5, 7), (STALLED, 6, 8), (COMMUNICATION, 8, 10)]
    assert [(span.start, span.end) for span in second if span.lane == COMMUNICATION] == [
        (5, 7), (8, 10)]
    assert [kinds["exposed"] for kinds in split_time([first, second])] == [
        kinds["exposed"] for kinds in split_time(RANKS)]


def test_from_the_last_launch_on_only_the_wait_for_the_link_is_queued():
    # The first all-reduce keeps the link until 7, so the second one, launched by 6, waits.
    ranks = [[Span("all_reduce", COMMUNICATION, 3, 7, queued=2),
              Span("all_reduce", COMMUNICATION, 5.5, 10, queued=1.5)],
             [Span("all_reduce", COMMUNICATION, 5, 7),
              Span("all_reduce", COMMUNICATION, 6, 10, queued=1)]]
    for spans in from_last_launch(ranks):
        assert [(span.start, span.queued) for span in spans if span.lane == COMMUNICATION] == [
            (5, 0), (6, 1)]


def test_after_the_first_end_a_rank_waits():
    late = [RANKS[0], [*RANKS[1][:2], Span("all_reduce", COMMUNICATION, 8, 10.5), RANKS[1][3]]]
    _, second = from_last_launch(late)
    assert [(span.lane, span.start, span.end) for span in second[-3:-1]] == [
        (COMMUNICATION, 8, 10), (STALLED, 10, 10.5)]
    assert split_time(from_last_launch(late))[1]["exposed"] == split_time(late)[1]["exposed"] == 2
