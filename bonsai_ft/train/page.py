"""How is a finished run shown to a person? One HTML page, and numbers with units.

The page needs nothing else: no scripts, no network, curves as inline SVG. It takes plain dicts and
lists, so that it knows neither the loop nor the files; `report.py` gathers them.

A chart keeps its text size at every width: lines live in a stretched inner SVG of 1000 x 1000
units, everything that must not be stretched (ticks, marks) is placed in percent around it.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from pathlib import Path
from typing import Any

Point = tuple[float, float]
Record = Mapping[str, Any]
Sample = tuple[str, str, str]

# more points than this per curve cannot be seen, and would only make the page heavy
MAX_POINTS = 1000
MAX_TITLED_MARKS = 60
# below this many values a smoothed curve would only repeat the raw one
MIN_SMOOTHED = 10
LOG_SCALE_RATIO = 20


def format_bytes(num_bytes: float) -> str:
    """Decimal units, as disks and GPUs are sold: 1.4 GB, 512 MB."""
    if not math.isfinite(num_bytes):
        return "?"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if (value := num_bytes / size) >= 0.9995:
            return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """The two largest units: 45s, 3m10s, 2h05m, 3d04h."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{total % 60:02d}s" if minutes else f"{total}s"


def write_atomically(path: Path, text: str) -> None:
    """Replace a whole file: a reader, or a run that is killed, sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_html(
    path: Path,
    *,
    title: str,
    settings: Mapping[str, Any],
    summary: Record,
    steps: Sequence[Record],
    evals: Sequence[Record],
    samples: Sequence[Sample],
    notes: Sequence[str],
    commands: Sequence[str],
) -> None:
    """Write the report; `steps` and `evals` are the lines of metrics.jsonl, samples are
    (prompt, before, after)."""
    sections = [
        _headline(summary, steps, evals),
        _curves(steps, evals),
        _samples(samples),
        _commands(commands),
        _notes(notes),
        _settings(settings),
    ]
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n{_HEAD}\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="eyebrow">bonsai_ft training report</p><h1>{escape(title)}</h1>'
        "</header>\n" + "\n".join(filter(None, sections)) + "\n</main>\n</body>\n</html>\n"
    )
    # a lone surrogate from a broken decoder must not cost the user the whole report
    write_atomically(path, page.encode("utf-8", "replace").decode("utf-8"))


def _headline(summary: Record, steps: Sequence[Record], evals: Sequence[Record]) -> str:
    """The figures a reader came for: what the held-out loss did, and what that took."""
    tiles: list[tuple[str, str, str]] = []
    if math.isfinite(count := _number(summary.get("steps"))):
        epoch = _number(steps[-1].get("epoch")) if steps else math.nan
        tiles.append(("Steps", f"{count:,.0f}", _if_finite(epoch, "{:.2f} epochs")))
    if math.isfinite(tokens := _number(summary.get("tokens"))):
        tiles.append(("Trained tokens", _count(tokens), f"{tokens:,.0f}" if tokens >= 1e4 else ""))
    if math.isfinite(seconds := _number(summary.get("seconds"))):
        speeds = [y for _, y in _points(steps, "tokens_per_second") if math.isfinite(y)]
        median = statistics.median(speeds) if speeds else math.nan
        tiles.append(("Time", format_seconds(seconds), _if_finite(median, "{:,.0f} tokens/s")))
    planned, peak = (_number(summary.get(f"{k}_memory_bytes")) for k in ("planned", "peak"))
    if math.isfinite(peak):
        tiles.append(("Peak memory", format_bytes(peak), _planned(planned, peak)))
    elif math.isfinite(planned):
        tiles.append(("Planned memory", format_bytes(planned), "not measured"))
    if math.isfinite(trainable := _number(summary.get("trainable_parameters"))):
        exact = f"{trainable:,.0f}" if trainable >= 1e4 else ""
        tiles.append(("Trainable parameters", _count(trainable), exact))
    if math.isfinite(size := _number(summary.get("adapter_bytes"))):
        name = Path(str(summary.get("adapter") or "")).name
        tiles.append(("Adapter", format_bytes(size), name))
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for label, value, detail in tiles
    )
    figures = f'<dl class="tiles card">{cells}</dl>' if cells else ""
    outcome = _outcome(summary, evals)
    if not outcome and not figures:
        return ""
    return f'<section class="headline" aria-label="Key figures">{outcome}{figures}</section>'


def _outcome(summary: Record, evals: Sequence[Record]) -> str:
    base, final = (_number(summary.get(f"{key}_eval_loss")) for key in ("base", "final"))
    first, last = (_number(summary.get(f"{key}_train_loss")) for key in ("first", "last"))
    rows = []
    if "final_eval_loss" in summary or math.isfinite(base):
        tokens = _number(evals[-1].get("eval_tokens")) if evals else math.nan
        basis = "Held-out loss, nats per token" + _if_finite(tokens, " ({:,.0f} tokens)")
        rows.append(f"<h2>{basis}</h2>")
        rows.append(f'<p class="change">{_change(base, final, "{:.3f}")}{_delta(base, final)}</p>')
        perplexity = _change(_perplexity(base), _perplexity(final), "{:,.4g}")
        rows.append(f'<p class="minor"><span>Perplexity</span> {perplexity}</p>')
    if math.isfinite(first) or math.isfinite(last):
        change = _change(first, last, "{:.3f}")
        rows.append(f'<p class="minor"><span>Training loss</span> {change}</p>')
    return f'<div class="outcome card">{"".join(rows)}</div>' if rows else ""


def _change(before: float, after: float, pattern: str) -> str:
    old, new = (_if_finite(value, pattern) or "n/a" for value in (before, after))
    return (
        f'<span class="before">{old}</span> <span class="arrow" aria-label="to">&rarr;</span> '
        f"<strong>{new}</strong>"
    )


def _delta(before: float, after: float) -> str:
    if not math.isfinite(before - after) or before == 0:
        return ""
    if round(before - after, 3) == 0:
        return ' <span class="delta">unchanged</span>'
    tone, word, sign = ("good", "lower", "&minus;") if after < before else ("bad", "higher", "+")
    size, share = abs(after - before), abs(after - before) / abs(before)
    return f' <span class="delta {tone}">{size:.3f} {word} ({sign}{share:.1%})</span>'


def _planned(planned: float, peak: float) -> str:
    if not math.isfinite(planned) or planned <= 0:
        return ""
    share = f"{abs(peak / planned - 1):.0%}"
    if share == "0%":
        return f"planned {format_bytes(planned)}"
    return f"planned {format_bytes(planned)}, {share} {'over' if peak > planned else 'under'}"


@dataclass(frozen=True)
class Series:
    """One curve. `tone` is its colour in the style sheet, `kind` how it is drawn."""

    label: str
    points: Sequence[Point]
    tone: str
    kind: str = "line"


@dataclass(frozen=True)
class Axis:
    """A range of numbers and the ticks to write along it."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies: 0 at the low end, 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float) -> str:
        step = tick if self.is_log else self.ticks[1] - self.ticks[0]
        return _tick(tick, step)


def _curves(steps: Sequence[Record], evals: Sequence[Record]) -> str:
    loss, held_out = _points(steps, "loss"), _points(evals, "eval_loss")
    smoothed = smooth(loss)
    losses = [
        Series("training", loss, "first", "faint" if smoothed else "line"),
        Series("training, smoothed", smoothed, "first"),
        Series("held-out", held_out, "second", "marks"),
    ]
    rates = [
        Series("LoRA", _points(steps, "lr"), "first"),
        Series("codebooks", _points(steps, "codebook_lr"), "third", "dashed"),
    ]
    # a rate of zero throughout belongs to a part that was not trained
    rates = [one for one in rates if any(y for _, y in one.points)] or rates
    speed = [Series("tokens/s", _points(steps, "tokens_per_second"), "first")]
    norm = [Series("gradient norm", _points(steps, "grad_norm"), "first")]
    return (
        '<section aria-label="Curves">'
        + _chart("Loss", "nats per token", losses, is_large=True, pattern="{:.3f}")
        + '<div class="charts">'
        + _chart("Learning rate", "", rates)
        + _chart("Gradient norm", "before clipping", norm, may_be_log=True)
        + _chart("Speed", "input tokens per second", speed, from_zero=True, pattern="{:,.0f}")
        + "</div></section>"
    )


def _chart(
    name: str,
    unit: str,
    series: Sequence[Series],
    *,
    is_large: bool = False,
    from_zero: bool = False,
    may_be_log: bool = False,
    pattern: str = "{:.3g}",
) -> str:
    series = [s for s in series if any(math.isfinite(y) for _, y in s.points)]
    values = [y for s in series for _, y in s.points if math.isfinite(y)]
    inner = '<text class="empty" x="50%" y="50%">no values were recorded</text>'
    if values:
        xs = [x for s in series for x, _ in s.points]
        x_axis = _step_axis(max(xs), count=6 if is_large else 5)
        is_log = may_be_log and 0 < min(values) * LOG_SCALE_RATIO < max(values)
        if is_log:
            unit = f"{unit}, logarithmic".lstrip(", ")
            y_axis = log_axis(min(values), max(values))
        else:
            low = min(0.0, *values) if from_zero else min(values)
            y_axis = linear_axis(low, max(values), count=8 if is_large else 5)
        place = _placer(x_axis, y_axis)
        inner = _grid(x_axis, y_axis) + _lines(series, place) + _marks(series, place, pattern)
    label = f"{name} by step: " + ("; ".join(_spoken(s, pattern) for s in series) or "no values")
    legend = "".join(
        f'<li class="{s.tone}"><i class="{s.kind}"></i>{escape(s.label)}</li>' for s in series
    )
    legend = f'<ul class="legend">{legend}</ul>' if len(series) > 1 else ""
    return (
        f'<figure class="card{" large" if is_large else ""}"><figcaption><h2>{escape(name)} '
        f"<small>{escape(unit)}</small></h2>{legend}</figcaption>"
        f'<div class="frame"><svg role="img" aria-label="{escape(label)}" width="100%" '
        f'height="100%">{inner}</svg></div></figure>'
    )


def _placer(x_axis: Axis, y_axis: Axis) -> Callable[[Point], Point]:
    """From data to shares of the plot, y downwards as SVG counts it."""
    return lambda point: (x_axis.share(point[0]), 1 - y_axis.share(point[1]))


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    parts = ['<g aria-hidden="true">']
    for tick in y_axis.ticks:
        y = f"{100 * (1 - y_axis.share(tick)):.2f}%"
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick y" x="-8" y="{y}">{y_axis.label(tick)}</text>')
    for tick in x_axis.ticks:
        x = f"{100 * x_axis.share(tick):.2f}%"
        parts.append(f'<text class="tick x" x="{x}" y="100%" dy="18">{x_axis.label(tick)}</text>')
    parts.append('<text class="tick end" x="100%" y="100%" dy="36">step</text></g>')
    return "".join(parts)


def _lines(series: Sequence[Series], place: Callable[[Point], Point]) -> str:
    paths = []
    for one in series:
        for run in unbroken(one.points):
            spots = [place(point) for point in thin(run, MAX_POINTS)]
            if len(spots) > 1:
                data = " ".join(f"{1000 * x:.1f},{1000 * y:.1f}" for x, y in spots)
                paths.append(f'<polyline class="{one.kind} {one.tone}" points="{data}"/>')
    return (
        '<svg aria-hidden="true" class="stretched" viewBox="0 0 1000 1000" '
        f'preserveAspectRatio="none" width="100%" height="100%">{"".join(paths)}</svg>'
    )


def _marks(series: Sequence[Series], place: Callable[[Point], Point], pattern: str) -> str:
    """Round marks: every value of a "marks" curve, and values that no line reaches."""
    parts = []
    for one in series:
        finite = [point for run in unbroken(one.points) for point in run]
        alone = [run[0] for run in unbroken(one.points) if len(run) == 1]
        # past this many, marks would hide the line that joins them
        is_marked = one.kind == "marks" and len(finite) <= MAX_TITLED_MARKS
        for point in finite if is_marked else alone:
            x, y = place(point)
            title = f"{one.label}, step {point[0]:,.0f}: {pattern.format(point[1])}"
            parts.append(
                f'<circle class="{one.tone}" cx="{100 * x:.2f}%" cy="{100 * y:.2f}%" r="4">'
                f"<title>{escape(title)}</title></circle>"
            )
        if one.kind == "marks":
            ends = {"start": finite[0], "end": finite[-1]} if len(finite) > 1 else {}
            for anchor, point in ends.items():
                x, y = place(point)
                parts.append(
                    f'<text class="value {one.tone}" text-anchor="{anchor}" x="{100 * x:.2f}%" '
                    f'y="{100 * y:.2f}%" dy="-11">{pattern.format(point[1])}</text>'
                )
    return "".join(parts)


def _spoken(series: Series, pattern: str) -> str:
    """What a screen reader says instead of the curve."""
    finite = [point for point in series.points if math.isfinite(point[1])]
    (x0, y0), (x1, y1) = finite[0], finite[-1]
    text = f"{series.label} {pattern.format(y0)} at step {x0:,.0f}"
    return text if x0 == x1 else f"{text}, {pattern.format(y1)} at step {x1:,.0f}"


def linear_axis(low: float, high: float, count: int) -> Axis:
    """An axis of about `count` round steps that holds low and high."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # nothing that is drawn here can be below zero by chance: 0 alone gets 0 to 1
        margin = abs(high) / 10
        low, high = (low - margin, high + margin) if margin else (0.0, 1.0)
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis from the 1, 2 or 5 below `low` to the one above `high`."""
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    nice = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    below, above = max(v for v in nice if v <= low), min(v for v in nice if v >= high)
    ticks = [v for v in nice if below <= v <= above]
    if len(ticks) > 6:
        powers = [10.0**e for e in exponents if below <= 10.0**e <= above]
        ticks = powers[:: math.ceil(len(powers) / 6)]
    return Axis(below, above, ticks, is_log=True)


def _step_axis(last: float, count: int) -> Axis:
    # ends at the last step itself, so that the curves fill the width
    last = max(last, 1.0)
    step = max(1.0, _round_step(last / count))
    return Axis(0.0, last, [index * step for index in range(int(last / step + 1e-9) + 1)])


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))


def _tick(value: float, step: float) -> str:
    if abs(value) < step * 1e-6:
        return "0"
    if abs(step) < 9.99e-4:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size:
            return f"{value / size:g}{suffix}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def smooth(points: Sequence[Point]) -> list[Point]:
    """Centred moving average over a twentieth of the run; empty where there is little to smooth.

    Centred, unlike the usual exponential average, so that the curve does not lag behind the loss.
    Values that are not finite stay breaks and do not spread to their neighbours.
    """
    if len(points) < MIN_SMOOTHED:
        return []
    sums, counts = [0.0], [0]
    for _, y in points:
        is_finite = math.isfinite(y)
        sums.append(sums[-1] + (y if is_finite else 0.0))
        counts.append(counts[-1] + is_finite)
    reach = max(2, len(points) // 40)
    # at the ends the window has less on one side; shortened on both it does not bend the curve,
    # and where it would hold almost nothing the curve stops
    shortest = (reach + 1) // 2
    smoothed = []
    for index in range(shortest, len(points) - shortest):
        side = min(reach, index, len(points) - 1 - index)
        left, right = index - side, index + side + 1
        mean = (sums[right] - sums[left]) / max(1, counts[right] - counts[left])
        x, y = points[index]
        smoothed.append((x, mean if math.isfinite(y) else math.nan))
    return smoothed


def unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """The stretches between values that are not finite."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points that draw the same: the lowest and the highest of each stretch."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return kept


def _points(records: Sequence[Record], key: str) -> list[Point]:
    pairs = [(_number(record.get("step")), _number(record.get(key))) for record in records]
    return [(x, y) for x, y in pairs if math.isfinite(x)]


def _number(value: object) -> float:
    """NaN for what is missing: null is how metrics.jsonl holds a value that is not finite."""
    return float(value) if isinstance(value, int | float) else math.nan


def _perplexity(loss: float) -> float:
    # exp overflows just above 709
    return math.exp(loss) if loss < 700 else math.nan


def _if_finite(value: float, pattern: str) -> str:
    return pattern.format(value) if math.isfinite(value) else ""


def _count(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10_000 and value / size >= 0.9995:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}"


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    rows = "".join(
        f'<tr><th scope="row" dir="auto">{_text(prompt)}</th>'
        f'<td data-label="Before" dir="auto">{_text(before)}</td>'
        f'<td data-label="After" dir="auto">{_text(after)}</td></tr>'
        for prompt, before, after in samples
    )
    return (
        '<section class="card"><h2>What it answers</h2><table class="samples"><thead><tr>'
        '<th scope="col">Prompt</th><th scope="col">Before</th><th scope="col">After</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _text(text: str) -> str:
    return escape(text) if text.strip() else '<em class="muted">(nothing)</em>'


def _commands(commands: Sequence[str]) -> str:
    if not commands:
        return ""
    lines = escape("\n".join(commands))
    return (
        '<section class="card"><h2>What to do next</h2>'
        f'<pre tabindex="0"><code>{lines}</code></pre></section>'
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="card"><h2>Notes</h2><ul class="notes">{items}</ul></section>'


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    loose = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
    groups = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    if loose:
        groups["run"] = {**groups.get("run", {}), **loose}
    blocks = "".join(
        f"<div><h3>{escape(str(name))}</h3><table>{_setting_rows(group)}</table></div>"
        for name, group in groups.items()
        if group
    )
    return (
        '<details class="card"><summary><h2>Settings</h2></summary>'
        f'<div class="settings">{blocks}</div></details>'
    )


def _setting_rows(group: Mapping[str, Any], prefix: str = "") -> str:
    rows = []
    for key, value in group.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            rows.append(_setting_rows(value, f"{name}."))
            continue
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(_as_typed(value))}</td></tr>'
        )
    return "".join(rows)


def _as_typed(value: Any) -> str:
    """A setting as YAML would show it."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str | Path):
        return str(value) or '""'
    return json.dumps(value, ensure_ascii=False, default=str)


# the policy makes the promise of the first paragraph binding: the browser loads and runs nothing
_HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">"""

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f4; --card: #ffffff; --edge: #e1e5de; --text: #1c231e; --muted: #5d6a61;
  --grid: #e9ece6; --code: #f3f5f0; --good: #1f7a46; --bad: #b3401f; --good-wash: #e3f2e8;
  --bad-wash: #fbe8e1; --first: #23804d; --second: #c2560c; --third: #6b54b8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101412; --card: #181d1a; --edge: #2a322d; --text: #e5ebe6; --muted: #97a49b;
    --grid: #262d29; --code: #121614; --good: #74cf97; --bad: #f39a76; --good-wash: #1b3325;
    --bad-wash: #3b231a; --first: #62c08a; --second: #f0964f; --third: #ab9bf2;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--text); line-height: 1.55; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "PingFang SC",
    "Hiragino Sans GB", "Microsoft YaHei", "Noto Sans CJK SC", "Noto Sans", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 36px 20px 64px; }
header { margin: 0 0 24px; }
h1 { font-size: 30px; line-height: 1.2; margin: 2px 0 0; letter-spacing: -0.015em;
  overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0; font-weight: 650; }
h2 small { font-size: 13px; font-weight: 400; color: var(--muted); margin-left: 4px; }
h3 { font-size: 13px; margin: 0 0 6px; color: var(--muted); font-weight: 600; }
.eyebrow { margin: 0; color: var(--first); font-size: 13px; font-weight: 600; }
.muted { color: var(--muted); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 12px;
  padding: 18px 20px; margin: 0 0 16px; break-inside: avoid; }
.card > h2 { margin-bottom: 12px; }

.headline { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 7fr); gap: 16px;
  margin-bottom: 16px; }
.headline > * { margin: 0; }
.headline > :only-child { grid-column: 1 / -1; }
.outcome { display: flex; flex-direction: column; justify-content: center; }
.outcome h2 { color: var(--muted); font-size: 13px; font-weight: 500; }
.outcome p { margin: 0; font-variant-numeric: tabular-nums; }
.change { font-size: 34px; letter-spacing: -0.02em; line-height: 1.35; }
.change strong { font-weight: 680; }
.before, .arrow { color: var(--muted); font-weight: 400; }
.change .delta { display: inline-block; font-size: 13px; letter-spacing: 0; line-height: 1;
  vertical-align: middle; padding: 6px 9px; border-radius: 99px; background: var(--code);
  white-space: nowrap; }
.change .good { color: var(--good); background: var(--good-wash); }
.change .bad { color: var(--bad); background: var(--bad-wash); }
.minor span:first-child { display: inline-block; min-width: 104px; color: var(--muted); }
.minor strong { font-weight: 600; }
.minor .before { min-width: 0 !important; }
.outcome .change + .minor { margin-top: 8px; }
.tiles { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 18px 20px; }
.tiles dt { color: var(--muted); font-size: 13px; }
.tiles dd { margin: 0; font-size: 21px; font-weight: 620; line-height: 1.3;
  letter-spacing: -0.01em; font-variant-numeric: tabular-nums; }
.tiles small { display: block; font-size: 12.5px; font-weight: 400; color: var(--muted);
  letter-spacing: 0; overflow-wrap: anywhere; }

.charts { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 16px;
  margin-bottom: 16px; }
.charts figure { margin: 0; }
figure { margin: 0 0 16px; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 20px; justify-content: space-between;
  align-items: baseline; }
.charts figcaption { min-height: 46px; align-content: flex-start; }
.frame { height: 196px; padding: 16px 6px 42px 46px; }
.large .frame { height: 356px; padding-right: 10px; }
.frame > svg { display: block; overflow: visible; }
.legend { display: flex; flex-wrap: wrap; gap: 0 18px; margin: 0; padding: 0; list-style: none;
  font-size: 13px; color: var(--muted); }
.legend i { display: inline-block; width: 20px; margin-right: 7px; vertical-align: 4px;
  border-top: 2px solid currentColor; }
.legend .first i { color: var(--first); }
.legend .second i { color: var(--second); }
.legend .third i { color: var(--third); }
.legend i.faint { opacity: 0.45; border-top-width: 1px; }
.legend i.dashed { border-top-style: dashed; }
.legend i.marks { width: 9px; height: 9px; border-radius: 9px; vertical-align: -0.5px;
  background: currentColor; border: 0; }
.grid { stroke: var(--grid); }
.tick { fill: var(--muted); font-size: 12px; font-variant-numeric: tabular-nums; }
.tick.y { text-anchor: end; dominant-baseline: central; }
.tick.x { text-anchor: middle; }
.tick.end { text-anchor: end; }
.empty { fill: var(--muted); font-size: 13px; text-anchor: middle; }
.stretched { overflow: visible; }
polyline { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; vector-effect: non-scaling-stroke; }
polyline.faint { stroke-width: 1; opacity: 0.4; }
polyline.dashed { stroke-dasharray: 6 4; }
polyline.first, circle.first { color: var(--first); }
polyline.second, circle.second { color: var(--second); }
polyline.third, circle.third { color: var(--third); }
circle { fill: currentColor; stroke: var(--card); stroke-width: 1.5; }
.value { font-size: 13px; font-weight: 650; fill: var(--second); stroke: var(--card);
  stroke-width: 4px; paint-order: stroke; stroke-linejoin: round; }

table { border-collapse: collapse; width: 100%; }
th, td { text-align: start; vertical-align: top; font-weight: 400; }
.samples { table-layout: fixed; }
.samples th:first-child { width: 24%; }
.samples thead th { color: var(--muted); font-size: 13px; padding: 0 20px 6px 0; }
.samples tbody th, .samples td { border-top: 1px solid var(--edge); padding: 12px 20px 12px 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.samples tbody th { font-weight: 600; }
.samples td[data-label="Before"] { color: var(--muted); }
.samples tr > :last-child { padding-inline-end: 0; }
pre { margin: 0; background: var(--code); border-radius: 8px; padding: 14px 16px;
  overflow-x: auto; font-size: 13.5px; line-height: 1.7; }
pre, .settings td { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  "Noto Sans Mono CJK SC", monospace; }
.notes { margin: 0; padding-left: 20px; overflow-wrap: anywhere; }
.notes li + li { margin-top: 4px; }
summary { cursor: pointer; }
summary h2 { display: inline; }
.settings { columns: 3 260px; column-gap: 32px; margin-top: 16px; font-size: 13px; }
.settings div { break-inside: avoid; margin-bottom: 18px; }
.settings th, .settings td { border-top: 1px solid var(--edge); padding: 4px 12px 4px 0;
  overflow-wrap: anywhere; }
.settings th { color: var(--muted); width: 58%; }
.settings td { padding-right: 0; font-size: 12.5px; }

@media (max-width: 900px) {
  .headline, .charts { grid-template-columns: minmax(0, 1fr); }
  .charts figcaption { min-height: 0; }
}
@media (max-width: 600px) {
  main { padding: 24px 12px 40px; }
  h1 { font-size: 25px; }
  .card { padding: 16px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .large .frame { height: 300px; }
  .samples, .samples tbody, .samples tr, .samples th, .samples td { display: block; }
  .samples thead { display: none; }
  .samples tbody th:first-child { width: auto; padding: 12px 0 4px; }
  .samples td { border: 0; padding: 4px 0 8px; }
  .samples td::before { content: attr(data-label); display: block; font-size: 12px;
    color: var(--muted); }
}
"""
