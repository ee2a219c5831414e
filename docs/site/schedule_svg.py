"""Draw docs/assets/schedule.svg: an animation of one cycle of `diloco.schedule.Schedule`.

python -m docs.site.schedule_svg
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning_commfree.diloco.schedule import Schedule

TARGET = Path(__file__).resolve().parents[1] / "assets" / "schedule.svg"
SCHEDULE = Schedule(sync_every=12, num_fragments=4, overlap_steps=2)
SECONDS_PER_STEP = 0.75
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
WIDTH, HEIGHT, BOX, ROW = 720, 330, 150, 34
LEFT, RIGHT, TOP = 30, WIDTH - 30 - BOX, 56
TIME_X, TIME_Y, TIME_W, BAR = 120, 236, 570, 16


def drawing(schedule: Schedule) -> str:
    """Return the picture: two replicas, the fragments between them, and the steps below."""
    cycle = schedule.sync_every
    begin = 2 * cycle  # by then every fragment has been exchanged, so the animation can repeat
    seconds = cycle * SECONDS_PER_STEP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' font-family="sans-serif" font-size="13" fill="#222">',
        f"<title>{_title(schedule)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>',
        _text(LEFT + BOX / 2, 24, "replica 1 trains all the time"),
        _text(RIGHT + BOX / 2, 24, "replica 2 trains all the time"),
        _text(WIDTH / 2, 44, "slow link"),
    ]
    for p in range(schedule.total):
        parts += _fragment(schedule, p, begin, seconds)
    parts += _steps(schedule, begin, seconds)
    return "\n".join([*parts, "</svg>"]) + "\n"


def flights(schedule: Schedule, p: int, begin: int) -> Iterator[tuple[int, int]]:
    """Yield the steps after `begin` at which fragment p leaves and lands, within one cycle."""
    for step in range(begin, begin + schedule.sync_every):
        if p in schedule.launched_at(step):
            landing = next(t for t in range(step, step + step) if p in schedule.landed_at(t))
            yield step - begin, landing - begin


def _fragment(schedule: Schedule, p: int, begin: int, seconds: float) -> Iterator[str]:
    """Yield a fragment in both replicas, and the outer gradients that they send each other."""
    y, colour, cycle = TOP + p * ROW, COLOURS[p % len(COLOURS)], schedule.sync_every
    ((leaves, lands),) = flights(schedule, p, begin)
    for x in (LEFT, RIGHT):
        flash = _animate("fill-opacity", [0.25, 1.0, 0.25], [0, lands, lands + 1], cycle, seconds)
        yield (
            f'<rect x="{x}" y="{y}" width="{BOX}" height="{ROW - 6}" rx="4" fill="{colour}"'
            f' fill-opacity=".25" stroke="{colour}">{flash}</rect>'
        )
        yield _text(x + BOX / 2, y + 18, f"fragment {p}")
    between = LEFT + BOX + 4, RIGHT - 26
    for source, target, dy in ((*between, 4), (*between[::-1], 14)):
        shown = _animate("opacity", [0, 1, 0], [-1, leaves, lands], cycle, seconds)
        times = [0, leaves / cycle, lands / cycle, 1]
        path = _values([source, source, target, target])
        yield (
            f'<rect x="{source}" y="{y + dy}" width="22" height="8" rx="2" fill="{colour}"'
            f' opacity="0">{shown}<animate attributeName="x" values="{path}"'
            f' keyTimes="{_values(times)}" dur="{seconds:g}s" repeatCount="indefinite"/></rect>'
        )


def _steps(schedule: Schedule, begin: int, seconds: float) -> Iterator[str]:
    """Yield the steps of a cycle, the fragments in flight in each, and the moving time line."""
    cycle, unit = schedule.sync_every, TIME_W / schedule.sync_every
    yield _text(TIME_X - 62, TIME_Y - 14, "inner step")
    for step in range(cycle):
        yield _text(TIME_X + step * unit, TIME_Y - 14, str(begin + step))
    for p in range(schedule.total):
        y, colour = TIME_Y + p * (BAR + 2), COLOURS[p % len(COLOURS)]
        yield _text(TIME_X - 62, y + 12, f"fragment {p}")
        for leaves, lands in flights(schedule, p, begin):
            x, width = TIME_X + leaves * unit, (lands - leaves) * unit
            yield f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{BAR}" fill="{colour}"/>'
    ends = _values([TIME_X, TIME_X + TIME_W])
    yield (
        f'<rect x="{TIME_X}" y="{TIME_Y - 8}" width="2" height="{schedule.total * (BAR + 2) + 8}">'
        f'<animate attributeName="x" values="{ends}" dur="{seconds:g}s"'
        ' repeatCount="indefinite"/></rect>'
    )


def _animate(name: str, values: list[float], steps: list[int], cycle: int, seconds: float) -> str:
    """Return an attribute that jumps to each value at its step, over one cycle."""
    pairs = [(max(s, 0) / cycle, v) for s, v in zip(steps, values, strict=True)]
    if pairs[0][0] == pairs[1][0]:  # the second value holds from the start
        pairs = pairs[1:]
    pairs = [pair for pair in pairs if pair[0] < 1]
    return (
        f'<animate attributeName="{name}" values="{_values([v for _, v in pairs])}"'
        f' keyTimes="{_values([t for t, _ in pairs])}" calcMode="discrete" dur="{seconds:g}s"'
        ' repeatCount="indefinite"/>'
    )


def _values(numbers: list[float]) -> str:
    return ";".join(f"{number:.4g}" for number in numbers)


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle">{words}</text>'


def _title(schedule: Schedule) -> str:
    return (
        f"Streaming DiLoCo, H={schedule.sync_every}, P={schedule.num_fragments},"
        f" tau={schedule.overlap_steps}: each fragment leaves once a cycle, travels while both"
        f" replicas train, and lands {schedule.overlap_steps} steps later"
    )


def main() -> None:
    """Write the picture."""
    TARGET.write_text(drawing(SCHEDULE), encoding="utf-8")


if __name__ == "__main__":
    main()
