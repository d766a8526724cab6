"""Answers to chapter 02's exercises that read otherwise than the course's, right and wrong."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab.checks import find
from dplab.checks.exercise import AT_LEAST, NOT_ATTEMPTED, PASSED, WRONG
from dplab.exercises.contrastive_loss import gather
from dplab.exercises.weighted_mean import without_the_factor


class Untouched(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x

    @staticmethod
    def backward(context, gradient):
        raise NotImplementedError


def test_a_class_whose_static_method_is_still_the_stub_is_not_attempted():
    assert find("sum-over-ranks").judge(Untouched).outcome == NOT_ATTEMPTED


def masked_by_hand(logits, targets):
    mask = targets != -100
    count = mask.sum().float()
    dist.all_reduce(count)
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each * mask).sum() * dist.get_world_size() / count


def mean_without_nan(logits, targets):
    own = (targets != -100).sum().float()
    total = own.clone()
    dist.all_reduce(total)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).nan_to_num()
    return dist.get_world_size() * own / total * mean


def divided_by_the_mean_count(logits, targets):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (targets != -100).sum().item())
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / (sum(counts) / len(counts))


def counted_in_a_list_of_one(logits, targets):
    count = torch.tensor([float((targets != -100).sum())])
    dist.all_reduce(count)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return dist.get_world_size() * loss / count


class FromAllGather(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return sum(parts)

    @staticmethod
    def backward(context, gradient):
        return FromAllGather.apply(gradient.contiguous())


def all_queries_with_gradient(queries, keys, temperature):
    logits = gather(queries) @ gather(keys).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits)))


def with_keys_in_turn(queries, keys, temperature):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    placed = F.one_hot(torch.tensor(rank), ranks)[None, :, None] * keys[:, None]
    all_keys = find("sum-over-ranks").solution.apply(placed).flatten(0, 1)
    labels = ranks * torch.arange(len(keys)) + rank
    return F.cross_entropy(queries @ all_keys.T / temperature, labels)


def with_the_loss_of_all_ranks(queries, keys, temperature):
    own = find("contrastive-loss").solution(queries, keys, temperature)
    return find("sum-over-ranks").solution.apply(own) / dist.get_world_size()


@pytest.mark.slow
@pytest.mark.parametrize(("slug", "answer"), [
    ("weighted-mean", masked_by_hand),
    ("weighted-mean", mean_without_nan),
    ("weighted-mean", divided_by_the_mean_count),
    ("weighted-mean", counted_in_a_list_of_one),
    ("sum-over-ranks", FromAllGather),
    ("contrastive-loss", all_queries_with_gradient),
    ("contrastive-loss", with_keys_in_turn),
    ("contrastive-loss", with_the_loss_of_all_ranks),
])
def test_a_right_answer_in_another_form_passes(slug, answer):
    verdict = find(slug).judge(answer)
    assert verdict.outcome == PASSED, verdict


@pytest.mark.slow
def test_the_missing_factor_is_told_from_the_counts_of_the_case():
    detail = find("weighted-mean").judge(without_the_factor).detail
    assert "(1 / the ranks)" in detail, detail


def loss_all_reduced_in_the_graph(logits, targets):
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    dist.all_reduce(loss)
    total = (targets != -100).sum()
    dist.all_reduce(total)
    return loss / total


class ReturnsItsInput(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def really_gathered(queries, keys, temperature):
    parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, keys.detach())
    labels = dist.get_rank() * len(keys) + torch.arange(len(keys))
    return F.cross_entropy(queries @ torch.cat(parts).T / temperature, labels)


def loss_added_up(queries, keys, temperature):
    own = find("contrastive-loss").solution(queries, keys, temperature)
    return find("sum-over-ranks").solution.apply(own)


def graph_left_where_there_is_no_token(logits, targets):
    total = (targets != -100).sum()
    own = int(total)
    dist.all_reduce(total)
    if own == 0:
        return torch.tensor(0.0, requires_grad=True)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return dist.get_world_size() * loss / total


@pytest.mark.slow
@pytest.mark.parametrize(("slug", "answer", "said"), [
    ("weighted-mean", loss_all_reduced_in_the_graph, "does not see what other ranks send"),
    ("sum-over-ranks", ReturnsItsInput, "`forward` overwrites x"),
    ("weighted-mean", graph_left_where_there_is_no_token, "does not come from its model"),
    ("contrastive-loss", really_gathered, "gathered without their gradients"),
    ("contrastive-loss", loss_added_up, "by a sum over the ranks"),
])
def test_a_wrong_answer_is_named(slug, answer, said):
    verdict = find(slug).judge(answer)
    assert verdict.outcome == WRONG
    assert said in verdict.why and not verdict.why.startswith(AT_LEAST), verdict
