"""Step times that others have published beside what `braid plan --time` predicts for the same configuration.

    python -m benchmarks.published_steps                 the table, errors by set, and what a factor would give
    python -m benchmarks.published_steps llama3          rows whose name has this in it
    python -m benchmarks.published_steps --rows FILE     rows of another file of the same form

No GPU is needed; without words it writes `results/published_steps.json`. `published_steps.json` has the rows,
each with its source and with what the source leaves open; `other_trainers.json` what is known of the trainers
behind them (see `other_trainers.py`). Predictions are made with the shipped calibrations; nothing is set per
row, and nothing is fitted. fp8 rows are listed apart: products in fp8 are not calibrated yet, so they are
predicted in bf16.

Beside them stands what a factor for each device would give, fitted to the median of its rows (of all rows,
where fewer than three have it), and what the same gives for the rows of a source that is left out of the fit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.other_trainers import Facts, TrainerMeter
from braid import recipes
from braid.architecture import Attention, LatentAttention, Mlp, Model, Moe
from braid.config import Data, Mesh, Optim, Run, Train
from braid.pattern import compact, cut_into, parse
from braid.planning import split
from braid.planning.plan import plan
from braid.timing.calibration import load
from braid.timing.links import load_cluster
from braid.timing.predict import Prediction, predict

ROWS = Path(__file__).with_name("published_steps.json")
RESULTS = Path(__file__).parent / "results" / "published_steps.json"
CLUSTERS = {"A100": "a100-ib", "H100": "h100-ib", "H800": "h800-ib", "B200": "b200-ib", "GB200": "gb200-nvl72"}
RECOMPUTE: Mapping[str, tuple[str, ...]] = {
    "full": ("full",),
    "core attention": ("core",),
    "norms, MLA up-projections": ("norm",),
    "none": (),
    "?": (),
}
"""What a row recomputes, as `train.recompute` has it; nothing where the source does not say. What `selective`
is depends on the trainer."""
NO_SEQUENCE_PARALLEL = "no sequence parallelism"
FEWEST = 3
"""Rows that a factor of one device needs."""
RATIOS: Mapping[str, tuple[str, str, float]] = {
    "full over selective recompute, GPT 22B on 8 A100": (
        "gpt-22b-a100-8-full", "gpt-22b-a100-8-selective", 1.0,
    ),
    "FSDP on 8 over tp 8 on 64, Llama 8B on H100": (
        "llama3-8b-titan-64-tp8", "llama3-8b-titan-8", (16 / 8) / (96 / 64),
    ),
}  # fmt: skip
"""Slow and fast row, and the samples of a GPU in the fast one over those in the slow one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published step and its prediction."""

    name: str
    published: float
    prediction: Prediction
    gpu: str
    source: str
    fp8: bool
    unknown: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.prediction.seconds / self.published - 1

    @property
    def inside(self) -> bool:
        return self.prediction.low <= self.published <= self.prediction.high

    @property
    def half_range(self) -> float:
        """Half the range, over the prediction."""
        return (self.prediction.high - self.prediction.low) / (2 * self.prediction.seconds)


def model_of(facts: Mapping[str, Any]) -> Model:
    """The shape of a model in the file."""
    if "braid_recipe" in facts:
        return recipes.load(facts["braid_recipe"]).model
    activation: Literal["swiglu", "gelu"] = "swiglu" if facts["glu"] else "gelu"
    moe = None
    if "experts" in facts:
        moe = Moe(
            experts=facts["experts"],
            top_k=facts["top_k"],
            ffn=facts["expert_ffn"],
            shared_ffn=facts.get("shared_ffn", 0),
        )
    attention = latent = None
    if "mla" in facts:
        mla = facts["mla"]
        latent = LatentAttention(
            heads=facts["heads"],
            q_rank=mla["q_lora"],
            kv_rank=mla["kv_lora"],
            nope_dim=mla["nope"],
            rope_dim=mla["rope"],
            v_dim=mla["v"],
        )
    else:
        attention = Attention(heads=facts["heads"], kv_heads=facts["kv_heads"], head_dim=facts["head_dim"])
        if "window" in facts:
            attention = replace(attention, window=128, window_pattern="SL")
    return Model(
        pattern=_pattern(facts),
        hidden=facts["hidden"],
        vocab=facts["vocab"],
        tied=facts.get("tied", False),
        attention=attention,
        latent_attention=latent,
        mlp=Mlp(ffn=facts["ffn"], activation=activation) if "ffn" in facts else None,
        moe=moe,
    )


def _pattern(facts: Mapping[str, Any]) -> str:
    mixer, layers = "+" if "mla" in facts else "*", facts["layers"]
    if "experts" not in facts:
        return f"[{mixer}-]x{layers}"
    dense = facts.get("dense_layers", 0)
    mtp = f"/{mixer}E" * facts.get("mtp", 0)
    return (f"[{mixer}-]x{dense}" if dense else "") + f"[{mixer}E]x{layers - dense}" + mtp


def _in_segments(model: Model, segments: int) -> Model:
    """The model with so many segments, as equal in blocks as they can be."""
    layout = parse(model.pattern)
    if segments == 1 or len(layout.segments) > 1:
        return model
    sizes = split.in_line(split.Costs(blocks=(2,) * len(layout.blocks), last=1), segments)
    return replace(model, pattern=compact(cut_into(layout, sizes)))


def run_of(row: Mapping[str, Any], models: Mapping[str, Any], selective: tuple[str, ...] = ("core",)) -> Run:
    """The run that a row describes. Trainers with a pipeline keep the weights that they gathered until the end
    of the step, as TorchTitan does and the Llama 3 paper says: that is sharding of gradients here."""
    model = _in_segments(model_of(models[row["model"]]), row["pp"] * row["vp"] if row["vp"] > 1 else 1)
    lanes = row["gpus"] // (row["tp"] * row["cp"] * row["pp"])
    return Run(
        model=model,
        data=Data(sequence_tokens=row["sequence"]),
        optim=Optim(),
        mesh=Mesh(
            tp=row["tp"],
            cp=row["cp"],
            pp=row["pp"],
            ep=row["ep"],
            shard="gradients" if row["shard"] == "all" and row["pp"] > 1 else row["shard"],
            dispatcher="deep_ep" if row["ep"] > 1 else "auto",
        ),
        train=Train(
            steps=1000,
            batch_samples=row["global_batch"],
            micro_batches=row["global_batch"] // (row["micro_batch"] * lanes),
            dtype="bf16",
            recompute=_recompute(row, selective),  # type: ignore[arg-type]
        ),
    )


def _recompute(row: Mapping[str, Any], selective: tuple[str, ...]) -> tuple[str, ...]:
    """DeepEP's order of tokens may differ when they are sent again, so that blocks with experts are not
    replayed as a whole here: their parts are."""
    names = selective if row["recompute"] == "selective" else RECOMPUTE[row["recompute"]]
    return ("norm", "activation", "core", "experts") if row["ep"] > 1 and "full" in names else names


def predicted(row: Mapping[str, Any], models: Mapping[str, Any], facts: Facts) -> Row:
    trainer, cluster = facts.trainer_of(row), load_cluster(CLUSTERS[row["gpu"]])
    calibration = facts.calibration_of(row, load(cluster.device))
    metered = partial(TrainerMeter, trainer=trainer, sequence_parallel=NO_SEQUENCE_PARALLEL not in row["note"])
    run = run_of(row, models, trainer.selective)
    found = predict(plan(run, row["gpus"]), cluster, calibration, metered=metered)
    published = row["step_s"]
    if published is None:  # rows that give TFLOP/s alone
        published = found.seconds * found.flops_per_second / (1e12 * row["model_tflops_per_gpu"])
    return Row(
        name=row["id"],
        published=published,
        prediction=found,
        gpu=row["gpu"],
        source=trainer.name,
        fp8="fp8" in row["dtype"],
        unknown=tuple(row["unknown"]),
    )


# ------------------------------------------------------------------------------------------ what a factor gives


def factor_of(gpu: str, rows: Sequence[Row]) -> float:
    """Published over predicted seconds, in the median of a device's rows; of all, if few have it."""
    own = [row for row in rows if row.gpu == gpu]
    ratios = [row.published / row.prediction.seconds for row in (own if len(own) >= FEWEST else rows)]
    return math.exp(statistics.median(math.log(ratio) for ratio in ratios)) if ratios else 1.0


def by_source(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """For each source the median error of its rows, as predicted and with factors of all other sources."""
    sources: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        sources[row.source].append(row)
    return {
        source: {
            "rows": len(own),
            "error": statistics.median(abs(row.error) for row in own),
            "left_out": statistics.median(
                abs((1 + row.error) * factor_of(row.gpu, [each for each in rows if each.source != source]) - 1)
                for row in own
            ),
        }
        for source, own in sources.items()
    }


# ------------------------------------------------------------------------------------------------------ report


def sets_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    bf16 = [row for row in rows if not row.fp8]
    sets = {
        "bf16, known": [row for row in bf16 if not row.unknown],
        "bf16, something unknown": [row for row in bf16 if row.unknown],
        "bf16, all": bf16,
        "fp8, predicted in bf16": [row for row in rows if row.fp8],
    }
    return {name: members for name, members in sets.items() if members}


def summary(rows: Sequence[Row], errors: Sequence[float]) -> dict[str, float]:
    """Figures of a set; `errors` are those of its rows, as predicted or with a factor."""
    return {
        "rows": len(rows),
        "median_error": statistics.median(map(abs, errors)),
        "within_25": sum(abs(error) <= 0.25 for error in errors),
        "inside_range": sum(row.inside for row in rows),
        "median_half_range": statistics.median(row.half_range for row in rows),
    }


def ratios_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Speed-ups that sources state, published and predicted: tokens per second of a GPU."""
    by_name = {row.name: row for row in rows}
    found = {}
    for name, (slow, fast, work) in RATIOS.items():
        if slow in by_name and fast in by_name:
            pair = by_name[slow], by_name[fast]
            published, predicted = (
                work * first / second
                for first, second in (
                    (pair[0].published, pair[1].published),
                    (pair[0].prediction.seconds, pair[1].prediction.seconds),
                )
            )
            found[name] = {"published": published, "predicted": predicted}
    return found


def report(rows: Sequence[Row]) -> dict[str, Any]:
    bf16 = [row for row in rows if not row.fp8]
    factors = {gpu: factor_of(gpu, bf16) for gpu in sorted({row.gpu for row in rows})}
    sets = {}
    for name, members in sets_of(rows).items():
        fitted = [(1 + row.error) * factors[row.gpu] - 1 for row in members]
        sets[name] = {
            **summary(members, [row.error for row in members]),
            "median_error_with_factors": statistics.median(map(abs, fitted)),
        }
    sources = by_source(bf16)
    over_sources = {
        name: statistics.median(each[name] for each in sources.values()) if sources else 0.0
        for name in ("error", "left_out")
    }
    return {
        "sets": sets,
        "ratios": ratios_of(rows),
        "factors": factors,
        "sources": sources,
        "median_over_sources": over_sources,
        "rows": [
            {
                "name": row.name,
                "published": row.published,
                "predicted": row.prediction.seconds,
                "low": row.prediction.low,
                "high": row.prediction.high,
                "error": row.error,
                "limited_by": row.prediction.limited_by,
                "parts": row.prediction.parts,
                "unknown": list(row.unknown),
            }
            for row in rows
        ],
    }


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'row':<34}{'published':>10}{'predicted':>10}{'error':>8}  {'range':<18}limited by"]
    for name, members in sets_of(rows).items():
        if name == "bf16, all":
            continue
        lines += ["", name]
        for row in members:
            found = row.prediction
            spread = f"{found.low:.3g} to {found.high:.3g}"
            mark = "" if not row.unknown else "   unknown: " + "; ".join(row.unknown)
            lines.append(
                f"{row.name:<34}{row.published:>9.3g}s{found.seconds:>9.3g}s{row.error:>+8.0%}  {spread:<18}"
                f"{found.limited_by}{mark}"
            )
    return "\n".join(lines)


def figures(found: Mapping[str, Any]) -> str:
    lines = [""]
    for name, each in found["sets"].items():
        lines += [
            f"{name}: {each['rows']} rows, off by {each['median_error']:.1%} in the median, "
            f"{each['within_25']} within 25 %",
            f"    {each['inside_range']} within their range, {each['median_half_range']:.0%} to each side "
            f"in the median; with fitted factors off by {each['median_error_with_factors']:.1%}",
        ]
    for name, each in found["ratios"].items():
        lines.append(f"{name}: published {each['published']:.2f}, predicted {each['predicted']:.2f}")
    lines.append(
        "factors, if fitted: " + ", ".join(f"{gpu} {each:.2f}" for gpu, each in found["factors"].items())
    )
    lines.append("bf16 rows by source, off as predicted, and with factors fitted to the other sources")
    for name, each in {**found["sources"], "median of them": found["median_over_sources"]}.items():
        lines.append(f"    {name:<16}{each.get('rows', ''):>3}{each['error']:>8.1%}{each['left_out']:>8.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="rows whose name has one of these; all by default")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of rows")
    given = parser.parse_args()
    file, facts = json.loads(given.rows.read_text()), Facts.of_file()
    rows = []
    for row in file["rows"]:
        if given.words and not any(word in row["id"] for word in given.words):
            continue
        try:
            rows.append(predicted(row, file["models"], facts))
        except Exception as error:
            print(f"{row['id']}: {error}", file=sys.stderr)
    found = report(rows)
    print(table(rows) + "\n" + figures(found))
    if not given.words and given.rows == ROWS:
        RESULTS.write_text(json.dumps(_rounded(found), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
