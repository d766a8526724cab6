"""The chapters' titles, as their notebooks' headings and README have them; a test compares."""

TITLES: dict[int, str] = {
    0: "Start here",
    1: "Split the batch, copy the model",
    2: "Why averaging gradients is right",
    3: "All-reduce",
    4: "DDP by hand",
    5: "Buckets and overlap",
    6: "Where the time goes",
    7: "Training at large batch",
    8: "ZeRO by hand",
    9: "FSDP",
    10: "Choosing and scaling",
}
