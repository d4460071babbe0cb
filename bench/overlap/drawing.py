"""Drawings: a timeline as a picture, as Perfetto would show it. Needs the extra ``aioinfer[drawings]``."""

from __future__ import annotations

from pathlib import Path

from aioinfer.observe.timeline import Timeline

__all__ = ["draw"]

COLOURS = {
    "plan": "#4c78a8",
    "pack": "#72b7b2",
    "resolve": "#f58518",
    "deliver": "#eeca3b",
    "launch": "#9d755d",
    "forward": "#54a24b",
    "mask": "#e45756",
    "sample": "#b279a2",
    "copy": "#bab0ac",
}


def draw(timeline: Timeline, path: Path, milliseconds: float = 30.0) -> None:
    """The last steps of a timeline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    end = timeline.device.events[-1][3]
    start = end - milliseconds / 1e3
    figure, axes = pyplot.subplots(figsize=(14, 2.6))
    lanes = [timeline.device, timeline.launch, timeline.loop]
    for height, lane in enumerate(lanes):
        for what, _, begin, stop in lane.events:
            if stop > start:
                axes.barh(
                    height, 1e3 * (stop - begin), left=1e3 * (begin - start), color=COLOURS[what], height=0.8
                )
    axes.set_yticks(range(3), [lane.name for lane in lanes])
    axes.set_xlim(0, milliseconds)
    axes.set_xlabel("milliseconds")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(
        handles,
        list(COLOURS),
        ncol=len(COLOURS),
        loc="upper center",
        bbox_to_anchor=(0.5, 1.25),
        frameon=False,
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
