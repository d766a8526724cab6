"""How long the slowest rank's step takes after a repair: what is saved may be lost to waiting."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases
from dplab.exercises.predict_step import predict_step
from dplab.predict.step import Layer

REPAIRS = "nothing", "data", "kernels", "straggler", "link"


def repaired_step(job, repair):
    """The seconds of the slowest rank's step of a sick job, with one of its causes repaired.

    ``job`` and ``repair`` as the exercise's notebook says. The scheduler knows what a repair frees.
    """
    ill = {cause: job[cause] for cause in ("data", "kernels", "straggler")}
    if repair in ill:
        ill[repair] = 0.0
    bandwidth = job["bandwidth"]
    if repair == "link":
        bandwidth = 2 * bandwidth
    layers, slower = job["layers"], ill["straggler"] / 2 / job["layers"]
    layer = Layer(job["forward"] + slower, job["backward"] + ill["kernels"] / layers + slower,
                  job["gradient_bytes"])
    seconds, _ = predict_step(layers * [layer], 1, job["ranks"], bandwidth, 0)
    return ill["data"] + seconds + job["optimizer"]


def sick_job(**numbers):
    return {"ranks": 8, "layers": 8, "forward": 0.015, "backward": 0.030, "optimizer": 0.040,
            "gradient_bytes": 65_536, "bandwidth": 2.65e6, "data": 0.064, "kernels": 0.040,
            "straggler": 0.056} | numbers


# In the second, backward is the bottleneck; in the third, each part differs.
JOBS = {"the chapter's job": sick_job(),
        "a job with a fast link": sick_job(bandwidth=21e6, layers=6, kernels=0.033),
        "a job on 5 ranks": sick_job(ranks=5, layers=3, forward=0.021, backward=0.047,
                                     optimizer=0.013, bandwidth=1.7e6, data=0.0, straggler=0.009)}
PREDICTED = 'seconds, _ = predict_step(layers * [layer], 1, job["ranks"], bandwidth, 0)'
SENDING = '2 * (job["ranks"] - 1) / job["ranks"] * job["gradient_bytes"] / bandwidth'
CASES = tuple((name, repair) for name in JOBS for repair in REPAIRS)


class RepairedStep(Calculation):
    number = "6.4"
    title = "What does a repair bring back?"
    minutes = 8
    tolerance = 1e-3
    solution = staticmethod(repaired_step)

    def trial(self, attempt):
        return of_cases(seconds_of_the_step, CASES,
                        lambda name, repair: float(attempt(dict(JOBS[name]), repair)))

    def expected(self, world_size):
        return of_cases(seconds_of_the_step, CASES, lambda name, repair: repaired_step(
            JOBS[name], repair))

    hints = (
        "You have a function that says how long a step takes: `predict_step` of chapter 05. What "
        "are the slowest rank's layers like?",
        "The wait for data stands before the step, and the optimizer behind it. Where in the "
        "step do slower kernels stand, and where does the straggler's delay?",
        "Set what is repaired to 0, or double the bandwidth. Then `predict_step(layers * [layer], "
        "1, ranks, bandwidth, 0)[0]` is the step without data and optimizer: a bucket closes at "
        "1 byte, so each layer is one. Its `layer` is the slowest rank's, with all that is ill.",
    )
    slips = (
        Slip("You take the repaired seconds off the step, as if nothing else would change. Predict "
             "the step without them: what is saved beside a bottleneck turns into waiting.",
             {"ill[repair] = 0.0": "pass",
              "+ job[\"optimizer\"]":
              "+ job[\"optimizer\"] - (job[repair] if repair in ill else 0)"}),
        Slip("The straggler's delay is missing. The step ends with the slowest rank.",
             {"ill[\"straggler\"] / 2 / job[\"layers\"]": "0.0"}),
        Slip("The straggler's delay stands in backward alone. Half of it is in forward.",
             {"+ slower, job": ", job", "/ layers + slower": "/ layers + 2 * slower"}),
        Slip("The straggler's delay stands in forward alone. Half of it is in backward.",
             {"+ slower, job": "+ 2 * slower, job", "/ layers + slower": "/ layers"}),
        Slip("You count one half of the straggler's delay: one stands in forward, and one in "
             "backward.", {"+ slower, job": ", job"}, {"/ layers + slower": "/ layers"}),
        Slip("You count the straggler's delay twice. Forward has half of it, and backward the "
             "other half.", {"ill[\"straggler\"] / 2 / job": "ill[\"straggler\"] / job"}),
        Slip("Each layer gets a delay that is the whole step's. `straggler` is that of the step: "
             "spread it over the layers, in forward and in backward.",
             {"ill[\"straggler\"] / 2 / job[\"layers\"]": "ill[\"straggler\"] / 2"},
             {"ill[\"straggler\"] / 2 / job[\"layers\"]": "ill[\"straggler\"]"},
             {"+ slower, job": "+ layers * slower, job"},
             {"/ layers + slower": "/ layers + layers * slower"},
             {"/ layers + slower": "/ layers + 2 * layers * slower"}),
        Slip("Each layer gets all seconds of the slower kernels. `kernels` is those of the step.",
             {"ill[\"kernels\"] / layers": "ill[\"kernels\"]"}),
        Slip("The slower kernels stand in forward. They are those of backward.",
             {"job[\"forward\"] + slower": "job[\"forward\"] + ill[\"kernels\"] / layers + slower",
              "+ ill[\"kernels\"] / layers + slower,\n": "+ slower,\n"}),
        Slip("The wait for data is missing: it stands before forward.",
             {"ill[\"data\"] + seconds": "seconds"}),
        Slip("The optimizer is missing: it begins when all gradients are there.",
             {" + job[\"optimizer\"]": ""}),
        Slip("You halve the exposed seconds where the link is twice as fast. Predict the step with "
             "twice the bandwidth: the link then waits for backward.",
             {"bandwidth = 2 * bandwidth": "pass", "seconds, _ =": "seconds, exposed =",
              "+ seconds": "+ seconds - exposed / 2 * (repair == \"link\")"}),
        Slip("The link is no faster after it was repaired: it has twice the bandwidth.",
             {"bandwidth = 2 * bandwidth": "pass"}),
        Slip("The link is half as fast after it was repaired. It has twice the bandwidth.",
             {"= 2 * bandwidth": "= bandwidth / 2"}),
        Slip("You add one all-reduce to the end of backward. That holds where the link keeps up. "
             "Here the all-reduces queue behind each other.",
             {PREDICTED:
              f"seconds = layers * (layer.forward_seconds + layer.backward_seconds) + {SENDING}"}),
        Slip("You take the longer of computing and communication. They do not begin together: the "
             "first gradient leaves only after forward and one layer's backward, and they do not "
             "end together, for the last one leaves when backward is over.",
             *({PREDICTED: f"seconds = {longer}"} for longer in (
                 f"layers * max(layer.forward_seconds + layer.backward_seconds, {SENDING})",
                 f"layers * (layer.forward_seconds + max(layer.backward_seconds, {SENDING}))"))),
        Slip("The ring's factor is missing. A rank sends 2 (N - 1) / N times a gradient's bytes.",
             *({'"gradient_bytes"])': f'"gradient_bytes"] * {factor})'} for factor in (
                 'job["ranks"] / (job["ranks"] - 1)', 'job["ranks"] / (job["ranks"] - 1) / 2'))),
        Slip("Nothing is hidden in your step: its communication is added to all of its computing. "
             "Here each layer is a bucket of its own, which leaves during backward.",
             {"layers * [layer], 1,": "layers * [layer], 10**12,"}),
    )


def seconds_of_the_step(case, seconds):
    name, repair = case
    return {f"{name}: the seconds of the step after the repair of {repair}": seconds}
