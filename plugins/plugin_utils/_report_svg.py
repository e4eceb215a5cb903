# SPDX-License-Identifier: GPL-3.0-or-later
"""Plots as plain SVG text. Private to the collection: it may change at any time."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Optional

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 10, 40


def ticks(low: float, high: float, wanted: int = 4, whole: bool = False) -> list[tuple[float, str]]:
    """Round values between two others, with their texts: what a person would have written on the axis."""
    if not high > low:
        return [(low, f"{low:g}")]
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= raw * 0.999)
    if whole:
        step = float(max(1, round(step)))
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if abs(step / size - 2.5) < 1e-6 and size <= 1 else 0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(n * step, f"{n * step + 0.0:,.{digits}f}".replace(",", " ")) for n in range(first, last + 1)]


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

    def axes(self, x_label: str, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]) -> None:
        """Both axes, a faint line at each value of the upright one, and texts."""
        floor, edge = self.height - BOTTOM, WIDTH - RIGHT
        lines = "".join(f"M{LEFT} {self.py(value):.0f}H{edge}" for value, _text in y_ticks)
        self.parts.append(f'<path class="grid" d="{lines}"/><path class="axis" d="M{LEFT} {TOP}V{floor}H{edge}"/>')
        for value, text in y_ticks:
            self.text(LEFT - 6, self.py(value) + 4, text, "e")
        for value, text in x_ticks:
            half = len(text) * 3.3  # of its width, about: a text at an edge stays inside
            self.text(min(max(self.px(value), half), WIDTH - half), floor + 16, text, "m")
        self.text((LEFT + edge) / 2, self.height - 6, x_label, "m")

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(f'<text class="{anchor}" x="{x:.0f}" y="{y:.0f}">{html.escape(text)}</text>')

    def svg(self, label: str) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{html.escape(label, quote=True)}">'
            + "".join(self.parts)
            + "</svg>"
        )


def trace(
    points: Sequence[tuple[float, float]],
    x_label: str,
    label: str,
    names: Sequence[tuple[float, str]] = (),
    height: int = 150,
) -> str:
    """A line through points; one lonely point is a dot. `names` stand on the x axis instead of numbers."""
    across, up = [x for x, _y in points], [y for _x, y in points]
    frame = Frame((min(across), max(across)), (0.0, max(up) * 1.05), height)
    frame.axes(x_label, names or ticks(*frame.x, whole=True), ticks(*frame.y))
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
    alone = high - low < abs(high) * 1e-6
    if alone:  # one value: one bar in the middle
        count, low, high = 5, low - abs(high) * 0.025, high + abs(high) * 0.025 + 1e-9
    step = (high - low) / count
    bins = [0] * count
    for value in values:
        bins[min(count - 1, int((value - low) / step))] += 1
    frame = Frame((low, low + step * count), (0.0, float(max(bins))))
    marks = [(values[0], f"{values[0]:.4g}")] if alone else ticks(*frame.x)
    frame.axes(x_label, marks, ticks(*frame.y, whole=True))
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
    frame.axes("cards, slowest first", (), [(value, f"{text} %") for value, text in ticks(*frame.y)])
    if base is not None:
        y = frame.py(base)
        frame.parts.append(f'<path class="base" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
    for place, (value, slow) in enumerate(ordered):
        kind = "dot slow" if slow else "dot"
        x = frame.px(float(place) if len(ordered) > 1 else 0.5)
        frame.parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{frame.py(value):.1f}" r="3.5"/>')
    return frame.svg(label)
