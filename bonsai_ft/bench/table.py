"""How is a report shown? As JSON, and as the Markdown table made from that JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bonsai_ft.bench.timing import OURS, Report

Json = dict[str, Any]
NOTHING = "-"


def as_json(report: Report) -> Json:
    return asdict(report)


def markdown(report: Json) -> str:
    """A table, and below it the machine, its limits and what there is to note."""
    header, rows = _TABLES[report["bench"]](report)
    return "\n".join([*_table(header, rows), "", *_below(report)])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if index == 0 else "---:" for index in range(len(header))]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]


def _below(report: Json) -> list[str]:
    machine, limits, settings = report["machine"], report["limits"], report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    simple = {k: v for k, v in settings.items() if not isinstance(v, dict)}
    about = ", ".join(f"{key.replace('_', ' ')} {_plain(v)}" for key, v in simple.items())
    lines = [
        f"{report['subject']}: {about}",
        (
            f"{machine['processor']}, {machine['threads']} threads, {machine['dtype']}, kernel "
            f"{machine['kernel']}, load average at start {machine['load_average_at_start']}"
        ),
        (
            "limits measured in the same run: product "
            f"{limits['gemm_gflop_per_second']:,.0f} GFLOP/s, "
            f"copy {limits['copy_gb_per_second']:.1f} GB/s"
        ),
        versions,
        *report["notes"],
    ]
    if "call_microseconds" in settings:
        calls = ", ".join(f"{k} {v:.1f}" for k, v in settings["call_microseconds"].items())
        lines.insert(1, f"microseconds of one call: {calls}")
    return [f"- {line}" for line in lines]


def _plain(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _operator(report: Json) -> tuple[list[str], list[list[str]]]:
    # a layer may lack a peer that others have
    peers = list(dict.fromkeys(n for row in report["rows"] for n in row["ratios"]))
    header = ["layer (in x out)", "tokens", "work", "ours ms", "limit ms", "packed GB/s"]
    for peer in peers:
        header += [f"{peer} ms", "ours / it"]
    header.append("codebook gradient")
    rows = []
    for row in report["rows"]:
        cells = [row["layer"], str(row["tokens"]), row["work"]]
        cells += [_number(row["milliseconds"][OURS]), _number(row["limit_milliseconds"])]
        cells.append(_number(row["packed_gb_per_second"]))
        for peer in peers:
            cells += [_number(row["milliseconds"].get(peer)), _ratio(row["ratios"].get(peer))]
        share = row["codebook_share"]
        cells.append(NOTHING if share is None else f"{100 * share:.1f}%")
        rows.append(cells)
    return header, rows


def _step(report: Json) -> tuple[list[str], list[list[str]]]:
    header = [
        "side", "seconds", "lowest to highest", "ours / it", "limit s", "tokens/s", "first loss",
        "loaded MB", "peak MB", "ours / it",
    ]  # fmt: skip
    return header, [
        [
            row["side"],
            _number(row["seconds"]),
            _spread(row["spread"]),
            _ratio(row["time_ratio"]),
            _number(row["limit_seconds"]),
            _number(row["tokens_per_second"]),
            _number(row["first_loss"]),
            _megabytes(row["resident_bytes"]),
            _megabytes(row["peak_bytes"]),
            _ratio(row["memory_ratio"]),
        ]
        for row in report["rows"]
    ]


def _decode(report: Json) -> tuple[list[str], list[list[str]]]:
    header = [
        "side", "tokens/s", "lowest to highest", "ours is faster by", "limit", "with the prompt",
        "prompt tokens/s", "ours is faster by", "limit",
    ]  # fmt: skip
    return header, [
        [
            row["side"],
            _number(row["tokens_per_second"]),
            _spread(row["spread"]),
            _ratio(row["ratio"]),
            _number(row["limit_tokens_per_second"]),
            _number(row["answer_tokens_per_second"]),
            _number(row["prefill_tokens_per_second"]),
            _ratio(row["prefill_ratio"]),
            _number(row["prefill_limit_tokens_per_second"]),
        ]
        for row in report["rows"]
    ]


def _load(report: Json) -> tuple[list[str], list[list[str]]]:
    header = [
        "side", "seconds", "lowest to highest", "ours / it", "limit s", "file MB", "added MB",
        "with first token s", "added by then MB",
    ]  # fmt: skip
    return header, [
        [
            row["side"],
            _number(row["seconds"]),
            _spread(row["spread"]),
            _ratio(row["ratio"]),
            _number(row["limit_seconds"]),
            _megabytes(row["file_bytes"]),
            _megabytes(row["resident_bytes"]),
            _number(row["first_token_seconds"]),
            _megabytes(row["used_bytes"]),
        ]
        for row in report["rows"]
    ]


def _profile(report: Json) -> tuple[list[str], list[list[str]]]:
    header = ["operation", "calls", "ms", "share"]
    return header, [
        [
            row["operation"],
            f"{row['calls']:,}",
            _number(row["milliseconds"]),
            f"{100 * row['share']:.1f}%",
        ]
        for row in report["rows"]
    ]


_TABLES: dict[str, Callable[[Json], tuple[list[str], list[list[str]]]]] = {
    "operator": _operator,
    "step": _step,
    "decode": _decode,
    "load": _load,
    "profile": _profile,
}


def _number(value: float | None) -> str:
    """Three digits, without an exponent."""
    if value is None:
        return NOTHING
    text = f"{float(f'{value:.3g}'):,.10f}"
    return text.rstrip("0").rstrip(".")


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f} x"


def _spread(values: Sequence[float]) -> str:
    return f"{_number(values[0])} to {_number(values[1])}"


def _megabytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value / 1e6:,.0f}"
