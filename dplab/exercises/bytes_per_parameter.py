"""Exercise 1.3: bytes per parameter, counted."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.checks.exercise import Calculation, Mistake


def bytes_per_parameter(model, optimizer, others=()):
    parameters = list(model.parameters())
    tensors = [*parameters, *others]
    tensors += [parameter.grad for parameter in parameters if parameter.grad is not None]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]

    sizes = {}
    for tensor in tensors:
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
    return sum(sizes.values()) / sum(parameter.numel() for parameter in parameters)


def _held(model, optimizer, others=()) -> list:
    """Every tensor that counts; one that is in it twice, or shares its memory, is there twice."""
    return [*model.parameters(), *_gradients(model), *_state(optimizer), *others]


def _gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _state(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()
            if torch.is_tensor(value)]


def _once(tensors: Iterable[torch.Tensor]):
    """The bytes under the tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _numbers(model):
    return sum(parameter.numel() for parameter in model.parameters())


def each_tensor_by_itself(model, optimizer, others=()):
    total = sum(tensor.nbytes for tensor in _held(model, optimizer, others))
    return total / _numbers(model)


def each_object_once(model, optimizer, others=()):
    tensors = {id(tensor): tensor for tensor in _held(model, optimizer, others)}
    return sum(tensor.nbytes for tensor in tensors.values()) / _numbers(model)


def by_their_own_address(model, optimizer, others=()):
    tensors = {tensor.data_ptr(): tensor for tensor in _held(model, optimizer, others)}
    return sum(tensor.nbytes for tensor in tensors.values()) / _numbers(model)


def storages_not_compared(model, optimizer, others=()):
    held = _held(model, optimizer, others)
    return sum(tensor.untyped_storage().nbytes() for tensor in held) / _numbers(model)


def parameters_alone(model, optimizer, others=()):
    return _once(model.parameters()) / _numbers(model)


def gradients_alone(model, optimizer, others=()):
    return _once(_gradients(model)) / _numbers(model)


def state_alone(model, optimizer, others=()):
    return _once(_state(optimizer)) / _numbers(model)


def no_gradients(model, optimizer, others=()):
    return _once([*model.parameters(), *_state(optimizer), *others]) / _numbers(model)


def no_optimizer(model, optimizer, others=()):
    return _once([*model.parameters(), *_gradients(model), *others]) / _numbers(model)


def no_others(model, optimizer, others=()):
    return _once(_held(model, optimizer)) / _numbers(model)


def no_parameters(model, optimizer, others=()):
    return _once([*_gradients(model), *_state(optimizer), *others]) / _numbers(model)


def parameters_and_gradients(model, optimizer, others=()):
    return _once([*model.parameters(), *_gradients(model)]) / _numbers(model)


def parameters_and_state(model, optimizer, others=()):
    return _once([*model.parameters(), *_state(optimizer)]) / _numbers(model)


def parameters_and_others(model, optimizer, others=()):
    return _once([*model.parameters(), *others]) / _numbers(model)


def gradients_and_state(model, optimizer, others=()):
    return _once([*_gradients(model), *_state(optimizer)]) / _numbers(model)


def gradients_and_others(model, optimizer, others=()):
    return _once([*_gradients(model), *others]) / _numbers(model)


def state_and_others(model, optimizer, others=()):
    return _once([*_state(optimizer), *others]) / _numbers(model)


def four_times_the_parameters(model, optimizer, others=()):
    return 4 * _once(model.parameters()) / _numbers(model)


def always_adam(model, optimizer, others=()):
    return 16.0


def always_two_moments(model, optimizer, others=()):
    parameters = _once(model.parameters())
    return (parameters + _once(_gradients(model)) + 2 * parameters + _once(others)) / _numbers(
        model)


def always_four_bytes(model, optimizer, others=()):
    return sum(4 * tensor.numel() for tensor in _held(model, optimizer, others)) / _numbers(model)


def one_tensor_of_each_storage(model, optimizer, others=()):
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes
                for tensor in _held(model, optimizer, others)}
    return sum(storages.values()) / _numbers(model)


def four_bytes_of_each_storage(model, optimizer, others=()):
    storages = {tensor.untyped_storage().data_ptr(): tensor.numel()
                for tensor in _held(model, optimizer, others)}
    return 4 * sum(storages.values()) / _numbers(model)


def without_steps(model, optimizer, others=()):
    moments = [value for state in optimizer.state.values() for name, value in state.items()
               if name != "step" and torch.is_tensor(value)]
    return _once([*model.parameters(), *_gradients(model), *moments, *others]) / _numbers(model)


def one_moment(model, optimizer, others=()):
    firsts = [next(iter(state.values())) for state in optimizer.state.values()]
    moments = [tensor for tensor in firsts if tensor is not None]
    return _once([*model.parameters(), *_gradients(model), *moments, *others]) / _numbers(model)


def only_what_trains(model, optimizer, others=()):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = _once([*trained, *_gradients(model), *_state(optimizer), *others])
    return total / sum(parameter.numel() for parameter in trained)


def frozen_left_out(model, optimizer, others=()):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _once([*trained, *_gradients(model), *_state(optimizer), *others]) / _numbers(model)


def divided_by_what_trains(model, optimizer, others=()):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _once(_held(model, optimizer, others)) / sum(each.numel() for each in trained)


def gradients_that_are_none(model, optimizer, others=()):
    found = [parameter.grad for parameter in model.parameters()]
    return _once([*model.parameters(), *found, *_state(optimizer), *others]) / _numbers(model)


def state_that_is_none(model, optimizer, others=()):
    state = [value for each in optimizer.state.values() for value in each.values()]
    return _once([*model.parameters(), *_gradients(model), *state, *others]) / _numbers(model)


def with_buffers(model, optimizer, others=()):
    held = [*model.state_dict().values(), *_gradients(model), *_state(optimizer), *others]
    return _once(held) / _numbers(model)


def elements_of_the_state_dict(model, optimizer, others=()):
    numbers = sum(tensor.numel() for tensor in model.state_dict().values())
    return _once(_held(model, optimizer, others)) / numbers


def not_divided(model, optimizer, others=()):
    return float(_once(_held(model, optimizer, others)))


def for_each_tensor(model, optimizer, others=()):
    return _once(_held(model, optimizer, others)) / len(list(model.parameters()))

_NOT_ONCE = ("You count memory twice where tensors share it: two parameters, or a gradient that "
             "is a piece of a bucket. Ask each tensor for its storage, and count each storage "
             "once, by its `data_ptr()`.")

_ADAM = ("You assume what the optimizer holds. SGD holds less than Adam, and frozen parameters "
         "have no state: count the tensors in `optimizer.state`.")

_FROZEN = ("Frozen parameters have no gradient and no state, but they are parameters, and lie in "
           "memory. Count all of `model.parameters()`, above and below the fraction bar.")

_STATE_DICT = ("`state_dict()` has buffers too, such as BatchNorm's running mean, and a tied "
               "weight under both names. Walk through `model.parameters()`.")


class BytesPerParameter(Calculation):
    number = "1.3"
    title = "Bytes per parameter, counted"
    minutes = 15
    hints = (
        "Make one list of all tensors that count. Where does a gradient lie, and where does the "
        "optimizer keep what it remembers of a parameter?",
        "`optimizer.state` maps each parameter to a dict, whose tensors count. Can two tensors of "
        "your list share memory? A tensor is a view on a *storage*, `untyped_storage()`, and "
        "several tensors can share one. It has `.nbytes()`, and an address, `.data_ptr()`.",
        "Put `storage.data_ptr(): storage.nbytes()` of each tensor into a dict, add up its values, "
        "and divide by the sum of `parameter.numel()`.",
    )
    solution = staticmethod(bytes_per_parameter)
    mistakes = (
        Mistake(each_tensor_by_itself, _NOT_ONCE),
        Mistake(each_object_once, _NOT_ONCE),
        Mistake(storages_not_compared, _NOT_ONCE),
        Mistake(by_their_own_address, "You compare the addresses of the *tensors*. A piece of a "
                "bucket begins somewhere inside it, so its own address is another; the address of "
                "the storage is the same: `tensor.untyped_storage().data_ptr()`."),
        Mistake(parameters_alone, "You counted the parameters alone. Gradients, the optimizer's "
                "state and `others` lie in memory beside them."),
        Mistake(gradients_alone, "You counted the gradients alone. The parameters themselves, the "
                "optimizer's state and `others` lie in memory beside them."),
        Mistake(state_alone, "You counted the optimizer's state alone. Parameters, gradients and "
                "`others` lie in memory beside it."),
        Mistake(no_gradients, "The gradients are missing: each parameter's `.grad`, where there "
                "is one."),
        Mistake(no_optimizer, "The optimizer's state is missing: the tensors in "
                "`optimizer.state`."),
        Mistake(no_others, "The tensors in `others` are missing."),
        Mistake(no_parameters, "The parameters are missing: their own bytes count too."),
        Mistake(parameters_and_gradients, "The optimizer's state and `others` are missing."),
        Mistake(parameters_and_state, "The gradients and `others` are missing."),
        Mistake(parameters_and_others, "The gradients and the optimizer's state are missing."),
        Mistake(gradients_and_state, "The parameters and `others` are missing."),
        Mistake(gradients_and_others, "The parameters and the optimizer's state are missing."),
        Mistake(state_and_others, "The parameters and gradients are missing."),
        Mistake(four_times_the_parameters, "You return four times the parameters' bytes, whatever "
                "there is. SGD holds less than Adam, a frozen parameter has no gradient, and "
                "`others` count too: add up the tensors."),
        Mistake(always_adam, "You return 16 whatever there is. Count: other dtypes, another "
                "optimizer, frozen parameters and buckets change the number."),
        Mistake(always_two_moments, _ADAM),
        Mistake(one_moment, "You took only one tensor of each parameter's state. Adam has more: "
                "two moments and a counter of steps."),
        Mistake(without_steps, "Adam's counter `step` is missing: it is a tensor of 4 bytes in the "
                "state of each parameter, beside the two moments."),
        Mistake(one_tensor_of_each_storage, "You count each storage once, but with the bytes of "
                "one of its tensors. A tensor may be a piece of its storage: take "
                "`storage.nbytes()`."),
        Mistake(four_bytes_of_each_storage, "You took 4 bytes for every number. In bf16 it is 2: "
                "take the bytes of the storages, `storage.nbytes()`."),
        Mistake(always_four_bytes, "You took 4 bytes for every number. In bf16 it is 2, and "
                "memory that is shared counts once: take the bytes of the storages."),
        Mistake(only_what_trains, _FROZEN),
        Mistake(frozen_left_out, _FROZEN),
        Mistake(divided_by_what_trains, _FROZEN),
        Mistake(gradients_that_are_none, "A parameter without a gradient has None in `.grad`, "
                "such as a frozen one. Leave it out."),
        Mistake(state_that_is_none, "The optimizer's state has None among its values. Leave it "
                "out: only tensors have memory."),
        Mistake(with_buffers, "You count buffers too, such as BatchNorm's running mean. They are "
                "no parameters, though `state_dict()` has them: walk through "
                "`model.parameters()`."),
        Mistake(elements_of_the_state_dict, _STATE_DICT),
        Mistake(not_divided, "This is the sum of all bytes. Divide it by the number of "
                "parameters, as in `parameter.numel()`."),
        Mistake(for_each_tensor, "You divided by the number of tensors. A parameter, here, is one "
                "number: add up `parameter.numel()`."),
    )

    def trial(self, attempt):
        facts = {}
        for name, case in _cases():
            try:
                answer = attempt(*case)
            except Exception as error:
                error.add_note(f"It was called with {name}.")
                raise
            facts[f"the bytes per parameter of {name}"] = _plain(answer)
        return facts

    def expected(self, world_size):
        """By hand: bytes of each kind; Adam has a counter of four bytes for each tensor."""
        numbers, tensors = 39, 4  # of two linear layers: 5 × 4 + 4 and 4 × 3 + 3
        adam = (16 * numbers + 4 * tensors) / numbers
        by_hand = {
            "a model trained with Adam and its counters": adam,
            "a model trained with SGD without momentum": 8.0,
            "a model in bf16, trained with SGD with momentum": 6.0,
            "a model whose first layer is frozen, trained with SGD with momentum":
                (12 * 15 + 4 * 24) / numbers,
            "a model with BatchNorm and a tied weight": (16 * 32 + 4 * 3) / 32,
            "a model under DDP": adam + 4,
            "a model under DDP whose first layer is frozen, and whose gradients are views into "
            "the buckets": (16 * 15 + 4 * 2 + 4 * 24) / numbers,
            "a model with two copies of its weights in bf16, one of them listed twice":
                adam + 2 * 32 / numbers,
            "a model whose parameters are pieces of one tensor": 8.0,
            "a model whose gradients are cleared, and whose optimizer's state has None": 4.0,
        }
        return {f"the bytes per parameter of {name}": number for name, number in by_hand.items()}


def _plain(answer):
    return float(answer) if isinstance(answer, int) else answer


def _cases():
    """(name, arguments) of each model, after one step of training."""
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    yield "a model trained with Adam and its counters", _stepped(_small(), adam)
    yield "a model trained with SGD without momentum", _stepped(_small(), sgd)
    yield ("a model in bf16, trained with SGD with momentum",
           _stepped(_small().bfloat16(), sgd, momentum=0.9))
    frozen = _small()
    frozen[0].requires_grad_(False)
    yield ("a model whose first layer is frozen, trained with SGD with momentum",
           _stepped(frozen, sgd, momentum=0.9))
    yield "a model with BatchNorm and a tied weight", _stepped(_Tied(), adam)
    for name, views in (("a model under DDP", False),
                        ("a model under DDP whose first layer is frozen, and whose gradients are "
                         "views into the buckets", True)):
        model, buckets = _small(), []
        model[0].requires_grad_(not views)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
        ddp.register_comm_hook(buckets, _keep)
        yield name, (*_stepped(ddp, adam), buckets)
    model = _small()
    copies = [layer.weight.detach().bfloat16() for layer in model]
    yield ("a model with two copies of its weights in bf16, one of them listed twice",
           (*_stepped(model, adam), [*copies, copies[0]]))
    model = _small()
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    pieces = flat.split([each.numel() for each in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.data = piece.view_as(parameter)
    yield "a model whose parameters are pieces of one tensor", _stepped(model, sgd)
    model, optimizer = _stepped(_small(), sgd)
    optimizer.state.update({each: {"momentum_buffer": None} for each in model.parameters()})
    optimizer.zero_grad()
    yield ("a model whose gradients are cleared, and whose optimizer's state has None",
           (model, optimizer))


class _Tied(nn.Module):
    """32 parameters in three tensors: a matrix of 6 × 4 with two names, and a BatchNorm's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(6, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding(x[:, 0].long())))


def _small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def _stepped(model, kind, **options):
    optimizer = kind([each for each in model.parameters() if each.requires_grad], lr=0.1, **options)
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 5, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def _keep(buckets, bucket):
    """A communication hook that sends nothing and keeps each bucket's tensor."""
    buckets.append(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
