"""The memory of a model and its optimizer, each storage counted once."""

import functools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip


def bytes_per_parameter(model, optimizer, others=()):
    parameters = list(model.parameters())
    tensors = [*parameters]
    tensors += [parameter.grad for parameter in parameters if parameter.grad is not None]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    tensors += others

    sizes = {}
    for tensor in tensors:
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
    number = sum(parameter.numel() for parameter in parameters)
    return sum(sizes.values()) / number


STATE = "[value for value in state.values() if torch.is_tensor(value)]"
TRAINED = "[each for each in parameters if each.requires_grad]"


class BytesPerParameter(Calculation):
    number = "1.4"
    title = "Bytes per parameter, counted"
    minutes = 15
    solution = staticmethod(bytes_per_parameter)

    def trial(self, attempt):
        facts = {}
        for name, case in trained_models():
            try:
                answer = attempt(*case)
            except Exception as error:
                error.add_note(f"It was called with {name}.")
                raise
            facts[fact_of(name)] = float(answer) if isinstance(answer, int) else answer
        return facts

    def expected(self, world_size):
        """By hand: bytes of each kind; Adam has a counter of four bytes for each tensor."""
        numbers, tensors = 39, 4  # of two linear layers: 5 × 4 + 4 and 4 × 3 + 3
        adam = (16 * numbers + 4 * tensors) / numbers
        by_hand = {
            "a model trained with Adam, beside two copies of its weights in bf16, one listed twice":
                adam + 2 * 32 / numbers,
            "a model trained with Adam and its counters": adam,
            "a model trained with SGD without momentum": 8.0,
            "a model in bf16, trained with SGD with momentum, beside its weights in float32": 10.0,
            "a model whose first layer is frozen, trained with SGD with momentum":
                (12 * 15 + 4 * 24) / numbers,
            "a model whose first layer is frozen after its last step with SGD": 8.0,
            "a model with BatchNorm and a tied weight": (16 * 32 + 4 * 3) / 32,
            "a model under DDP": adam + 4,
            "a model under DDP whose first layer is frozen, and whose gradients are views into "
            "the buckets": (16 * 15 + 4 * 2 + 4 * 24) / numbers,
            "a model with views into its parameters as `others`": 8.0,
            "a model whose parameters are pieces of one tensor": 8.0,
            "a model whose gradients are cleared": 4.0,
            "a model whose optimizer's state has None": 8.0,
        }
        return {fact_of(name): number for name, number in by_hand.items()}

    def terms(self):
        models = trained_models(with_ddp=False)  # DDP needs ranks, and this is said without them
        return {"models without DDP": {fact_of(name): sizes_of(*case) for name, case in models}}

    hints = (
        "Make one list of all tensors that count. Where does a gradient lie, and where does the "
        "optimizer keep what it remembers of a parameter?",
        "`optimizer.state` maps each parameter to a dict, whose tensors count. Can two tensors of "
        "your list share memory? A tensor is a view on a *storage*, `untyped_storage()`, and "
        "several tensors can share one. It has `.nbytes()`, and an address, `.data_ptr()`.",
        "Put `storage.data_ptr(): storage.nbytes()` of each tensor into a dict, add up its values, "
        "and divide by the sum of `parameter.numel()`.",
    )
    slips = (
        Slip("The parameters are missing: their own bytes count too.", {"[*parameters]": "[]"}),
        Slip("The gradients are missing: each parameter's `.grad`, where there is one.",
             {"[parameter.grad for parameter in parameters if parameter.grad is not None]": "[]"}),
        Slip("The optimizer's state is missing: the tensors in `optimizer.state`.",
             {STATE: "[]"}),
        Slip("The tensors in `others` are missing.", {"tensors += others": "pass"}),
        Slip("You count memory twice where tensors share it: a gradient that is a piece of a "
             "bucket, or a tensor that is listed twice. Does a tensor say in which memory it lies?",
             {"memory.data_ptr()": "len(sizes)", "memory.nbytes()": "tensor.nbytes"},
             {"memory.data_ptr()": "id(tensor)", "memory.nbytes()": "tensor.nbytes"},
             {"memory.data_ptr()": "len(sizes)"},
             {"memory.data_ptr()": "tensor.data_ptr(), tensor.nbytes",
              "memory.nbytes()": "tensor.nbytes"}),
        Slip("You count numbers and not bytes. A number has 2 or 4 bytes, or more.",
             {"memory.nbytes()": "tensor.numel()"},
             {"memory.data_ptr()": "len(sizes)", "memory.nbytes()": "tensor.numel()"}),
        Slip("You compare the addresses of the *tensors*. A piece of a bucket begins somewhere "
             "inside it, so its own address is another. Both are views on one *storage*.",
             {"memory.data_ptr()": "tensor.data_ptr()", "memory.nbytes()": "tensor.nbytes"},
             {"memory.data_ptr()": "tensor.data_ptr()"},
             {"[*parameters]": "[*parameters, *others]", "tensors += others": "pass",
              "memory.data_ptr()": "tensor.data_ptr()", "memory.nbytes()": "tensor.nbytes"},
             {"[*parameters]": "[*others, *parameters]", "tensors += others": "pass",
              "memory.data_ptr()": "tensor.data_ptr()", "memory.nbytes()": "tensor.nbytes"}),
        Slip("You count each storage once, but with the bytes of one of its tensors. A tensor may "
             "be a piece of its storage: take `storage.nbytes()`.",
             {"memory.nbytes()": "tensor.nbytes"},
             {"sizes[memory.data_ptr()] = memory.nbytes()":
              "sizes.setdefault(memory.data_ptr(), tensor.nbytes)"}),
        Slip("You took 4 bytes for every number. In bf16 it is 2.",
             {"memory.nbytes()": "4 * tensor.numel()"},
             {"memory.data_ptr()": "len(sizes)", "memory.nbytes()": "4 * tensor.numel()"}),
        Slip("You return four times the parameters' bytes, whatever there is. SGD holds less than "
             "Adam, a frozen parameter has no gradient, and `others` count too: add up the "
             "tensors.", {"sum(sizes.values())": "4 * sum(each.nbytes for each in parameters)"}),
        Slip("You return 16 whatever there is. Count: other dtypes, another optimizer, frozen "
             "parameters and buckets change the number.", {"sum(sizes.values()) / number": "16.0"}),
        Slip("You assume what the optimizer holds. SGD holds less than Adam, and frozen parameters "
             "have no state: count the tensors in `optimizer.state`.",
             {STATE: "[]", "tensors += others":
              "tensors += [each.clone() for each in parameters * 2]\ntensors += others"}),
        Slip("You took only one tensor of each parameter's state. Adam has more: two moments and a "
             "counter of steps.", {STATE: f"{STATE}[:1]"}, {STATE: f"{STATE}[-1:]"}),
        Slip("Adam's counter `step` is missing: it is a tensor of 4 bytes in the state of each "
             "parameter, beside the two moments.",
             {"if torch.is_tensor(value)": "if torch.is_tensor(value) and value.dim()"}),
        Slip("Frozen parameters are parameters, and lie in memory. Count all of "
             "`model.parameters()`, above and below the fraction bar.",
             {"= list(model.parameters())":
              "= [each for each in model.parameters() if each.requires_grad]"},
             {"[*parameters]": f"[*{TRAINED}]"},
             {"parameter in parameters)": f"parameter in {TRAINED})"},
             {"[*parameters]": f"[*{TRAINED}]",
              "parameter in parameters)": f"parameter in {TRAINED})"}),
        Slip("`requires_grad` does not tell whether there is a gradient: a parameter can be frozen "
             "after its backward, and `zero_grad` clears gradients. Ask whether `.grad` is None.",
             {"if parameter.grad is not None": "if parameter.requires_grad"},
             {"if parameter.grad": "if parameter.requires_grad and parameter.grad"}),
        Slip("A parameter without a gradient has None in `.grad`, such as a frozen one. Leave it "
             "out.", {" if parameter.grad is not None": ""}),
        Slip("The optimizer's state has None among its values. Leave it out: only tensors have "
             "memory.", {" if torch.is_tensor(value)": ""}),
        Slip("You count buffers too, such as BatchNorm's running mean. They are no parameters, "
             "though `state_dict()` has them: walk through `model.parameters()`.",
             {"[*parameters]": "[*parameters, *model.buffers()]"}),
        Slip("`state_dict()` has buffers too, such as BatchNorm's running mean, and a tied weight "
             "under both names. Walk through `model.parameters()`.",
             {"parameter in parameters)": "parameter in model.state_dict().values())"}),
        Slip("This is the sum of all bytes. Divide it by the number of parameters, as in "
             "`parameter.numel()`.", {" / number": ""}),
        Slip("You divided by the number of tensors. A parameter, here, is one number: add up "
             "`parameter.numel()`.",
             {"sum(parameter.numel() for parameter in parameters)": "len(parameters)"}),
    )


def fact_of(name):
    return f"the bytes per parameter of {name}"


def sizes_of(model, optimizer, others=()) -> dict[str, float]:
    """By name, terms of which an answer may be the sum: bytes per parameter."""
    parameters = list(model.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    state = [value for each in optimizer.state.values() for value in each.values()
             if torch.is_tensor(value)]
    held = [*parameters, *gradients, *state]
    nbytes = {"the memory of the parameters": once(parameters),
              "the memory of the gradients": once(gradients),
              "the memory of the optimizer's state": once(state),
              "the memory of `others`": once([*held, *others]) - once(held)}
    return {name: size / sum(each.numel() for each in parameters) for name, size in nbytes.items()}


def once(tensors):
    """The bytes under the tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@functools.cache
def trained_models(with_ddp=True):
    """(name, arguments) of each model after its training, made once for all answers of a rank."""
    return list(each_trained_model(with_ddp))


def each_trained_model(with_ddp):
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    model = two_layers()
    copies = [layer.weight.detach().bfloat16() for layer in model]
    yield ("a model trained with Adam, beside two copies of its weights in bf16, one listed twice",
           (*stepped(model, adam), [*copies, copies[0]]))
    yield "a model trained with Adam and its counters", stepped(two_layers(), adam)
    yield "a model trained with SGD without momentum", stepped(two_layers(), sgd)
    model = two_layers()
    copies = [each.detach().clone() for each in model.parameters()]
    yield ("a model in bf16, trained with SGD with momentum, beside its weights in float32",
           (*stepped(model.bfloat16(), sgd, momentum=0.9), copies))
    model = two_layers()
    model[0].requires_grad_(False)
    yield ("a model whose first layer is frozen, trained with SGD with momentum",
           stepped(model, sgd, momentum=0.9))
    model, optimizer = stepped(two_layers(), sgd)
    model[0].requires_grad_(False)
    yield "a model whose first layer is frozen after its last step with SGD", (model, optimizer)
    yield "a model with BatchNorm and a tied weight", stepped(Tied(), adam)
    for name, views in (("a model under DDP", False),
                        ("a model under DDP whose first layer is frozen, and whose gradients are "
                         "views into the buckets", True)) if with_ddp else ():
        model, buckets = two_layers(), []
        model[0].requires_grad_(not views)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
        ddp.register_comm_hook(buckets, keep)
        yield name, (*stepped(ddp, adam), buckets)
    model, optimizer = stepped(two_layers(), sgd)
    views = [model[0].weight[1:], model[0].weight[:2]]
    yield "a model with views into its parameters as `others`", (model, optimizer, views)
    model = two_layers()
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    pieces = flat.split([each.numel() for each in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.data = piece.view_as(parameter)
    yield "a model whose parameters are pieces of one tensor", stepped(model, sgd)
    model, optimizer = stepped(two_layers(), sgd)
    optimizer.zero_grad()
    yield "a model whose gradients are cleared", (model, optimizer)
    model, optimizer = stepped(two_layers(), sgd)
    optimizer.state.update({each: {"momentum_buffer": None} for each in model.parameters()})
    yield "a model whose optimizer's state has None", (model, optimizer)


class Tied(nn.Module):
    """32 parameters in three tensors: a matrix of 6 × 4 with two names, and a BatchNorm's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(6, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding(x[:, 0].long())))


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def stepped(model, kind, **options):
    optimizer = kind([each for each in model.parameters() if each.requires_grad], lr=0.1, **options)
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 5, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def keep(buckets, bucket):
    """A communication hook that sends nothing and keeps each bucket's tensor."""
    buckets.append(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
