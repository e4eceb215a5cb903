# SPDX-License-Identifier: GPL-3.0-or-later
"""Plots as plain SVG text. Private to the collection: it may change at any time."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Optional

WIDTH, HEIGHT = 440, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 26


def shown(value: float) -> str:
    """A short number for an axis."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


class Frame:
    """A box with two linear scales."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: int = HEIGHT) -> None:
        self.x = x if x[1] > x[0] else (x[0] - 0.5, x[0] + 0.5)
        self.y = y if y[1] > y[0] else (y[0] - 0.5, y[0] + 0.5)
        self.height = height
        self.parts: list[str] = []

    def px(self, value: float) -> float:
        return LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        return self.height - BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (self.height - TOP - BOTTOM)

    def axes(self, x_label: str, x_texts: bool = True, whole: bool = False) -> None:
        floor = self.height - BOTTOM
        self.parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}"/>')
        for share in (0.0, 1.0) if whole else (0.0, 0.5, 1.0):
            value = self.y[0] + share * (self.y[1] - self.y[0])
            self.text(LEFT - 5, self.py(value) + 4, f"{value:.0f}" if whole else shown(value), "end")
        if x_texts:
            self.text(LEFT, self.height - 10, shown(self.x[0]), "start")
            self.text(WIDTH - RIGHT, self.height - 10, shown(self.x[1]), "end")
        self.text((LEFT + WIDTH) / 2, self.height - 10, x_label, "middle")

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(text)}</text>')

    def svg(self, label: str) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{html.escape(label, quote=True)}">'
            + "".join(self.parts)
            + "</svg>"
        )


def trace(points: Sequence[tuple[float, float]], x_label: str, label: str, height: int = 130) -> str:
    """A line through points; one lonely point is a dot."""
    across, up = [x for x, _y in points], [y for _x, y in points]
    frame = Frame((min(across), max(across)), (0.0, max(up) * 1.05), height)
    frame.axes(x_label)
    frame.parts.append(f'<path class="trace" transform="scale(.25)" d="{_path(frame, points)}"/>')
    if len(points) <= 30:
        frame.parts += [f'<circle class="dot" cx="{frame.px(x):.0f}" cy="{frame.py(y):.1f}" r="3"/>' for x, y in points]
    return frame.svg(label)


def _path(frame: Frame, points: Sequence[tuple[float, float]]) -> str:
    """Quarter units and steps from one point to the next: a page with hundreds of these has to stay small."""
    spots = [(round(frame.px(x) * 4), round(frame.py(y) * 4)) for x, y in points]
    steps = [f"{x1 - x0}{y1 - y0:+d}" for (x0, y0), (x1, y1) in zip(spots, spots[1:])]
    return f"M{spots[0][0]} {spots[0][1]}" + ("l" + " ".join(steps) if steps else "")


def histogram(values: Sequence[float], x_label: str, label: str) -> str:
    """How often each size of value came; few values get few bars."""
    low, high = min(values), max(values)
    count = max(5, min(24, round(len(values) ** 0.5 * 2)))
    if high - low < abs(high) * 1e-6:
        count, low, high = 1, low - abs(high) * 0.01, high + abs(high) * 0.01 + 1e-9
    step = (high - low) / count
    bins = [0] * count
    for value in values:
        bins[min(count - 1, int((value - low) / step))] += 1
    frame = Frame((low, low + step * count), (0.0, float(max(bins))))
    frame.axes(x_label, whole=True)
    for place, size in enumerate(bins):
        if size:
            left, right = frame.px(low + place * step), frame.px(low + (place + 1) * step)
            top = frame.py(size)
            frame.parts.append(
                f'<rect class="bar" x="{left + 0.5:.1f}" y="{top:.1f}" width="{max(1.0, right - left - 1):.1f}" '
                f'height="{frame.height - BOTTOM - top:.1f}"/>'
            )
    return frame.svg(label)


def ranked(values: Sequence[tuple[float, bool]], label: str, base: Optional[float] = 0.0) -> str:
    """Every card as a dot, from the lowest to the highest, with the line that they should meet."""
    ordered = sorted(values)
    lowest, highest = ordered[0][0], ordered[-1][0]
    if base is not None:
        lowest, highest = min(lowest, base), max(highest, base)
    margin = (highest - lowest) * 0.08 or 1.0
    frame = Frame((0.0, float(max(1, len(ordered) - 1))), (lowest - margin, highest + margin))
    frame.axes("cards, slowest first", x_texts=False)
    if base is not None:
        y = frame.py(base)
        frame.parts.append(f'<path class="base" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
    for place, (value, slow) in enumerate(ordered):
        kind = "dot slow" if slow else "dot"
        x = frame.px(float(place) if len(ordered) > 1 else 0.5)
        frame.parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{frame.py(value):.1f}" r="3.5"/>')
    return frame.svg(label)
