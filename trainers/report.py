"""The report: one HTML page with everything inside, for the reader who was not there when it was trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from blueprints.measures import measures, results
from blueprints.recipe import Origin
from trainers.callbacks import duration, read_metrics
from trainers.checkpoint import write_text
from trainers.completions import FILE as COMPLETIONS
from trainers.completions import Sampled, telling
from trainers.completions import read as read_completions
from trainers.mask import CLOSE, LONGEST, OPEN, heading

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 28
"""Margins of a chart in pixels."""
SHOWN_PER_STEP = 6
"""Sampled completions shown of each batch that is shown."""
MOST_POINTS = 600
"""Points drawn of a curve: beyond that neighbours share a pixel."""

CURVES = {
    "loss": "loss",
    "reward": "mean reward",
    "rewards/accuracies": "preference accuracy",
    "rewards/margins": "reward margin",
    "rewards/chosen": "reward of the chosen",
    "rewards/rejected": "reward of the rejected",
    "logps/chosen": "log-probability of the chosen",
    "logps/rejected": "log-probability of the rejected",
    "logits/chosen": "mean logit in the chosen",
    "logits/rejected": "mean logit in the rejected",
    "reward_std": "standard deviation of the reward",
    "frac_reward_zero_std": "share of groups without a difference of reward",
    "kl": "KL to the reference",
    "entropy": "entropy",
    "clip_ratio/region_mean": "share of tokens whose ratio was clipped",
    "objective": "reward less penalties",
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "explained_variance": "share of the returns' variance that the values foresaw",
    "approx_kl": "change of the policy by the steps on a batch (approximate KL)",
    "ratio": "mean policy ratio",
    "policy_clipfrac": "share of tokens whose policy ratio was clipped",
    "value_clipfrac": "share of tokens whose value was clipped",
    "value": "mean value",
    "kl_coef": "weight of the KL penalty",
    "completions/mean_length": "mean length of completions",
    "completions/clipped_ratio": "share of completions cut at the limit",
    "mean_token_accuracy": "token accuracy",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}
"""Titles of the curves that have one, in the order they are drawn; a method's further curves come before the last three
under their own names."""
UNDRAWN = ("step", "epoch", "num_tokens")
"""Numbers of `metrics.jsonl` that say nothing as a curve."""

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #ffffff; --ink: #1d2025; --soft: #626b78; --line: #e3e5e8;
  --a: #2563eb; --b: #d9480f; --good: #15803d; --bad: #b91c1c; --mark: #dcfce7; }
@media (prefers-color-scheme: dark) { :root { --bg: #14161a; --card: #1c1f25; --ink: #e6e8eb; --soft: #98a2b0;
  --line: #30353d; --a: #7aa7ff; --b: #ff9a5c; --good: #4ade80; --bad: #f87171; --mark: #14422a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 72rem; background: var(--bg); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.55rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
.soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .75rem; margin-top: 1.25rem; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.3rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: .75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .38rem .7rem .38rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 550; } td.text, pre { white-space: pre-wrap; overflow-wrap: anywhere; }
code, pre, td.text, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: .84rem; }
pre { margin: .3rem 0; } mark { background: var(--mark); color: inherit; border-radius: .2rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 13px; }
.grid { stroke: var(--line); stroke-width: 1; } .a { stroke: var(--a); fill: none; stroke-width: 1.8; }
.b { stroke: var(--b); fill: none; stroke-width: 1.8; } .dot { fill: var(--b); }
.dot-a { fill: var(--a); } details summary { cursor: pointer; }
"""

Curve = Sequence[tuple[float, float]]


def write(record: Mapping[str, Any], output: Path, origins: Mapping[str, Origin]) -> Path:
    """Write `output/report.html` from the run's record and files.

    Args:
        record: what `run.json` holds.
        output: holds metrics.jsonl, samples.jsonl and, of a method that samples, completions.jsonl.
        origins: which layer set each key of the recipe.

    Returns:
        the page.
    """
    samples_file = output / "samples.jsonl"
    samples = (
        [json.loads(line) for line in samples_file.read_text(encoding="utf-8").split("\n") if line]
        if samples_file.exists()
        else []
    )
    path = output / "report.html"
    completions = read_completions(output / COMPLETIONS)
    write_text(path, page(record, read_metrics(output / "metrics.jsonl"), samples, completions, origins))
    return path


def page(
    record: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, str]],
    completions: Sequence[Sampled],
    origins: Mapping[str, Origin],
) -> str:
    """The whole page. Every text that comes from data is escaped; nothing is loaded from anywhere."""
    recipe = record["recipe"]
    title = f"{record['recipe_name']}: {recipe['model']['uri']} on {recipe['dataset']['uri']}"
    sections = [
        ("Answers before and after", _samples(samples)),
        ("What quantisation costs", _quantization(record.get("quantization", {}))),
        ("Curves", _curves(metrics)),
        ("Completions sampled in training", _completions(completions)),
        ("Proofs", _proofs(record["proofs"])),
        ("What carried loss", _masks(record["proofs"].get("mask", {}))),
        ("Data", _data(record.get("data", {}))),
        ("Cost", _cost(record["metrics"])),
        ("Effective settings", _table(["setting", "in effect"], record.get("effective", {}).items())),
        ("Recipe", _recipe(recipe, origins, record["recipe_hash"])),
        ("Versions", _table(["what", "version"], record["versions"].items())),
    ]
    body = "".join(f"<h2>{escape(name)}</h2>\n{content}\n" for name, content in sections if content)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<div class='soft'>method {escape(recipe['method'])} · {escape(record['status'])} · "
        f"started {escape(str(record['started']))} · ended {escape(str(record.get('ended') or ''))}</div>\n"
        f"{_tiles(record)}\n{body}</body>\n</html>\n"
    )


def _tiles(record: Mapping[str, Any]) -> str:
    metrics, tiles = record["metrics"], []
    tiles += [(f"{found.before} → {found.after}", found.label) for found in measures(metrics)]
    tiles += [(value, text) for text, value in results(metrics)]
    tiles.append((f"{metrics['train_loss']:.4f}", f"train loss over {metrics['steps']:,} steps"))
    tiles.append((duration(metrics["seconds"]), "all in all"))
    proved = [kind for kind, found in record["proofs"].items() if found.get("passed")]
    tiles.append(("passed" if proved else "none", f"artifact proof: {', '.join(proved)}"))
    return "<div class='tiles'>" + "".join(
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in tiles
    ) + "</div>"  # fmt: skip


def _samples(samples: Sequence[Mapping[str, str]]) -> str:
    if not samples:
        return ""
    lines = []
    for sample in samples:
        right = {key: sample.get(key, "").strip() == sample["reference"].strip() for key in ("before", "after")}
        cells = [("text", sample["prompt"]), ("text", sample["reference"])]
        cells += [(f"text {'good' if right[key] else 'bad'}", sample.get(key, "")) for key in ("before", "after")]
        lines.append("<tr>" + "".join(f"<td class='{kind}'>{escape(text)}</td>" for kind, text in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("prompt", "reference", "before", "after"))
    return f"<div class='card scroll'><table><tr>{head}</tr>{''.join(lines)}</table></div>"


def _quantization(found: Mapping[str, Any]) -> str:
    """The three held-out losses of quantisation-aware training."""
    if not found:
        return ""
    recovered = found["recovered"]
    words = {
        "full_precision": "trained without rounding, full precision",
        "post_training": "trained without rounding, quantised after training",
        "qat": "trained for being quantised, quantised",
    }
    lines = [[text, f"{found[name]:.4f}"] for name, text in words.items()]
    lines.append(
        [
            "of what quantisation loses, training for it wins back",
            f"{recovered:.0%}" if recovered is not None else "nothing was lost",
        ]
    )
    return _table(["model", "held-out loss"], lines)


def _completions(found: Sequence[Sampled]) -> str:
    """Some completions of the first batch that was written down, of the one in the middle and of the last."""
    steps = sorted({each.step for each in found})
    if not steps:
        return ""
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    shown = [each for step in chosen for each in telling([one for one in found if one.step == step], SHOWN_PER_STEP)]
    names = list(shown[0].rewards)
    lines = []
    for each in shown:
        numbers = [each.reward, *(each.rewards[name] for name in names if len(names) > 1), each.advantage]
        cells = [str(each.step), *("" if number is None else _short(number) for number in numbers)]
        lines.append(
            "<tr>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "".join(f"<td class='text'>{escape(text[:LONGEST])}</td>" for text in (each.prompt, each.completion))
            + "</tr>"
        )
    head = ["step", "reward", *(names if len(names) > 1 else []), "advantage", "prompt", "completion"]
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    note = f"<div class='soft'>{len(found):,} completions of {len(steps)} steps are in {COMPLETIONS}</div>"
    return f"<div class='card scroll'><table><tr>{top}</tr>{''.join(lines)}</table></div>{note}"


def _curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    def curve(name: str) -> Curve:
        return [(line["step"], line[name]) for line in metrics if name in line and math.isfinite(line[name])]

    names = dict.fromkeys(name for line in metrics for name in line if not name.startswith("eval_"))
    ordered = sorted((name for name in names if name not in UNDRAWN), key=_place)
    charts = [(CURVES.get(name, name), curve(name), curve(f"eval_{name}")) for name in ordered]
    drawn = "".join(_chart(name, first, second) for name, first, second in charts if first)
    return f"<div class='charts'>{drawn}</div>" if drawn else ""


def _place(name: str) -> tuple[int, int, str]:
    """Where a curve stands among the others."""
    known = list(CURVES)
    last = name in known[-3:]
    return (2 if last else 0 if name in CURVES else 1, known.index(name) if name in CURVES else 0, name)


def _chart(name: str, first: Curve, second: Curve) -> str:
    steps = [step for step, _ in [*first, *second]]
    values = [value for _, value in [*first, *second]]
    low, high = min(values), max(values)
    if high == low:
        low, high = low - abs(low or 1) * 0.5, high + abs(high or 1) * 0.5
    begin = min(steps)
    end = max([*steps, begin + 1])

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low + share * (high - low)
        _, y = place(begin, value)
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y}' y2='{y}'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4}' text-anchor='end'>{_short(value)}</text>")
    for step in (begin, end):
        x, _ = place(step, low)
        parts.append(f"<text x='{x}' y='{HEIGHT - 8}' text-anchor='middle'>{step:g}</text>")
    for kind, points in (("a", _thin(first)), ("b", _thin(second))):
        if points:
            path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
            parts.append(f"<polyline class='{kind}' points='{path}'/>")
    # A line of one point would be invisible.
    dots = [("dot-a", point) for point in first if len(first) == 1] + [("dot", point) for point in _thin(second)]
    for kind, point in dots:
        x, y = place(*point)
        parts.append(
            f"<circle class='{kind}' cx='{x}' cy='{y}' r='4'><title>step {point[0]:g}: {_short(point[1])}</title></circle>"
        )
    legend = f"{escape(name)}: <b style='color:var(--a)'>training</b>" if second else escape(name)
    legend += " and <b style='color:var(--b)'>held out</b>" if second else ""
    last = f"<span class='soft'> · last {_short(first[-1][1], 4)}</span>"
    label = f"role='img' aria-label='{escape(name)} by step'"
    return f"<div class='card'>{legend}{last}<svg viewBox='0 0 {WIDTH} {HEIGHT}' {label}>{''.join(parts)}</svg></div>"


def _short(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.{digits}g}"


def _thin(points: Curve) -> Curve:
    stride = max(1, -(-len(points) // MOST_POINTS))
    return points if stride == 1 else [*points[:-1:stride], points[-1]]


def _proofs(proofs: Mapping[str, Any]) -> str:
    lines = []
    for kind, found in proofs.items():
        if "passed" not in found:
            continue
        word = "<b class='good'>passed</b>" if found["passed"] else "<b class='bad'>FAILED</b>"
        text = (
            f"a fresh process reloaded it from disk; {found.get('rows', 0)} held-out rows, "
            f"{found.get('positions', 0)} positions: largest difference of a logit {found.get('difference', 0):.2g}, "
            f"allowed {found.get('bound', 0):.2g}"
        )
        if "adapter_effect" in found:
            text += f"; the adapter itself changes logits by up to {found['adapter_effect']:.2g}"
        if found.get("tensors"):
            text += f"; {found['tensors']} tensors equal to the trained ones bit for bit"
        lines.append(f"<tr><td>{escape(kind)}</td><td>{word}</td><td>{escape(text)}</td></tr>")
    return f"<div class='card scroll'><table>{''.join(lines)}</table></div>" if lines else ""


def _masks(mask: Mapping[str, Any]) -> str:
    rows = []
    for row in mask.get("rows", []):
        text = escape(row["text"]).replace(OPEN, "<mark>").replace(CLOSE, "</mark>")
        rows.append(f"<div class='soft'>{escape(heading(row))}</div><pre>{text}</pre>")
    return f"<div class='card'>{''.join(rows)}</div>" if rows else ""


def _data(data: Mapping[str, Any]) -> str:
    names = ("rows", "sequences", "tokens", "trained_tokens", "truncated", "dropped")
    lines = [
        [split, *(f"{counts.get(name, 0):,}" for name in names)] for split, counts in data.get("splits", {}).items()
    ]
    extra = f"<div class='soft mono'>fingerprint {escape(str(data.get('fingerprint', '')))}</div>"
    return _table(["split", *(name.replace("_", " ") for name in names)], lines) + extra if lines else ""


def _cost(metrics: Mapping[str, Any]) -> str:
    lines = [
        ("all in all", duration(metrics["seconds"])),
        ("training", duration(metrics["train_seconds"])),
        ("tokens", f"{metrics['tokens']:,}"),
        ("tokens per second", f"{metrics['tokens_per_second']:,}"),
        ("peak memory", f"{metrics['peak_memory_bytes'] / 2**30:.2f} GiB"),
    ]
    return _table(["", ""], lines)


def _recipe(recipe: Mapping[str, Any], origins: Mapping[str, Origin], recipe_hash: str) -> str:
    lines = []
    for key, value in _leaves(recipe):
        origin = origins.get(key)
        lines.append((key, json.dumps(value, ensure_ascii=False), origin or ""))
    table = _table(["key", "value", "set by"], lines)
    return f"<details><summary>{len(lines)} keys, hash <code>{escape(recipe_hash)}</code></summary>{table}</details>"


def _leaves(block: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in block.items():
        if value is None:
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _table(head: Sequence[str], lines: Iterable[Iterable[Any]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head) if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<div class='card scroll'><table>{f'<tr>{top}</tr>' if top else ''}{body}</table></div>"
