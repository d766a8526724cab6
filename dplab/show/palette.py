"""The colours of ranks, the same in every figure and in what ranks print."""

RANK_COLORS = (
    "#1C74CC",
    "#C05600",
    "#0B5A36",
    "#96127A",
    "#6907C0",
    "#966580",
    "#143500",
    "#4F0250",
)
"""Rank r is drawn in the r-th colour everywhere. Each has a contrast of at least 4.5 with white
(WCAG AA for text), and any two stay apart in simulated protanopia, deuteranopia, tritanopia."""


def rank_color(rank: int) -> str:
    """The colour of a rank, as ``#RRGGBB``; ranks beyond the palette start over."""
    return RANK_COLORS[rank % len(RANK_COLORS)]
