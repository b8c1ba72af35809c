"""Prints how the time of held GPUs divides into active, idle and unknown, per scenario and source.

Replays simulated nodes in virtual time through the real bindings, the real tick and the real ledger, one sample a
second. Run it on two checkouts to compare what they call unknown.

    python benchmarks/unknown_time.py [--seconds N] [--only TEXT]
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from pipeline_support import pipeline

from gpu_simulator import scenario

SHIPPED = ("demo", "a100-mig", "t4-timeslicing", "capture-h100-mig", "hami")
SOURCES = ("nvml", "auto", "dcgm")
TEMPLATE = """\
node: n
driver: 590.48.01
gpus: [{{{gpu}}}]
pods:
  - {{namespace: ml, name: p, container: c, start: -900, devices: [{{{device}}}], kind: inference, memory_mib: 2048,
     activity: {activity}, mix: {{{mix}}}}}
"""
COMPUTES = "engine: 1"
DECODES = "engine: 0.02, utilisation: 0.02, sm: 0, tensor: 0, dram: 0, decode: 1"
DECODES_JPEG = "engine: 0.02, utilisation: 0.02, sm: 0, tensor: 0, dram: 0, jpeg: 1"
H100_MIG, A100_MIG = "model: h100, mig: [3g.40gb]", "model: a100-80gb, mig: [3g.40gb]"
MADE = {
    "H100 idle": ("model: h100", "gpu: 0", "0", COMPUTES),
    "A100 idle": ("model: a100-80gb", "gpu: 0", "0", COMPUTES),
    "T4 idle": ("model: t4", "gpu: 0", "0", COMPUTES),
    "H100 MIG, idle instance": (H100_MIG, "gpu: 0, mig: 0", "0", COMPUTES),
    "A100 MIG, idle instance": (A100_MIG, "gpu: 0, mig: 0", "0", COMPUTES),
    "H100 MIG, instance decodes at 0.9": (H100_MIG, "gpu: 0, mig: 0", "0.9", DECODES),
    "A100 MIG, instance decodes at 0.9": (A100_MIG, "gpu: 0, mig: 0", "0.9", DECODES),
    "H100 decodes JPEG at 0.9": ("model: h100", "gpu: 0", "0.9", DECODES_JPEG),
    "H100 busy at 0.45, engine counter dead": (
        "model: h100, overrides: [{values: {PROF_GR_ENGINE_ACTIVE: 0}}]",
        "gpu: 0",
        "0.45",
        COMPUTES,
    ),
    "A100 busy in bursts, engine counter dead": (
        "model: a100-80gb, overrides: [{values: {PROF_GR_ENGINE_ACTIVE: 0}}]",
        "gpu: 0",
        "{square: {high: 0.99, low: 0.3, period: 3, duty: 0.67}}",
        COMPUTES,
    ),
}


def scenarios(folder: Path) -> Iterator[tuple[str, str]]:
    """Give (title, name or path) of every scenario."""
    for name in SHIPPED:
        yield name, name
    for number, (title, (gpu, device, activity, mix)) in enumerate(MADE.items()):
        file = folder / f"{number}.yaml"
        file.write_text(TEMPLATE.format(gpu=gpu, device=device, activity=activity, mix=mix), encoding="utf-8")
        yield title, str(file)


async def replay(name: str, source: str, seconds: int) -> tuple[float, ...]:
    """Return the parts of the pods' time that were active, idle and unknown, 0..1."""
    with tempfile.TemporaryDirectory() as folder:
        async with pipeline(scenario.load(name), Path(folder), start=0.0, source=source) as node:
            snapshot = await node.until(float(seconds), steps=seconds)
    totals = list(snapshot.ledger.pods.values()) if snapshot.ledger else []
    parts = [sum(getattr(one, f"{part}_seconds") for one in totals) for part in ("active", "idle", "unknown")]
    return tuple(part / max(sum(parts), 1e-9) for part in parts)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=120, help="virtual seconds per scenario and source")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    options = parser.parse_args()
    seconds = options.seconds
    print(f"| {seconds} s of | " + " | ".join(f"{source}: active, idle, **unknown**" for source in SOURCES) + " |")
    print("|---|" + "---:|" * len(SOURCES))
    with tempfile.TemporaryDirectory() as folder:
        for title, name in scenarios(Path(folder)):
            if options.only not in title:
                continue
            cells = []
            for source in SOURCES:
                active, idle, unknown = asyncio.run(replay(name, source, seconds))
                cells.append(f"{active:.1%}, {idle:.1%}, **{unknown:.1%}**")
            print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
