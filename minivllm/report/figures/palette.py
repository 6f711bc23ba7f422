"""Colours of the figures: what each one means on every page, safe for colour-blind readers, light
and dark."""

from __future__ import annotations

# Okabe and Ito (2008), without yellow (too faint on white).
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#999999",
    "#222222",
)
BROWN, OLIVE, AMBER = "#7a4b2a", "#97a03a", "#b8860b"
# Of options, arms and cells. Green and vermilion are for better and worse alone, amber for what is
# undecided.
PALETTE = (BLUE, ORANGE, PURPLE, SKY, BLACK, BROWN, OLIVE)
BETTER, WORSE, UNDECIDED, NEUTRAL = GREEN, VERMILION, AMBER, GREY
# Of the parts of one thing (memory, a step, a line of several), which no option has.
SLATE, TAUPE, MIST, SAND, HAZE, STONE, CLAY, PLUM, TEAL = (
    "#3d4f60",
    "#8c7b6b",
    "#7d93a8",
    "#c4b5a5",
    "#b8c6d3",
    "#dadada",
    "#b0603f",
    "#8b5a9c",
    "#2f8585",
)
MARKERS = "osD^vPX"
INK, FAINT, LIGHT, GRID = "#333333", "#777777", "#cfcfcf", "#e6e6e6"
EDGE, RULE = "#bbbbbb", "#b5b5b5"  # of axes; of a range
# Colours that are of no option, and what they become on a dark page.
ON_DARK = {
    "#ffffff": "#14171a",
    INK: "#dde1e5",
    FAINT: "#98a1aa",
    LIGHT: "#4a525a",
    GRID: "#2c3238",
    BLACK: "#e8eaec",
    EDGE: "#59616a",
    RULE: "#59616a",
    SLATE: "#a9bccd",
    STONE: "#4a4a4a",
}
