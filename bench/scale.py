"""A round from 2 to 4,096 peers: real ones on this machine, then the same rounds simulated.

    python -m bench.scale --measure 2,4,8,16     real rounds (root, ten minutes): the calibration
    python -m bench.scale                        simulation and pictures from the kept measurement

Real peers have lines of their own (``bench.links``). The simulation (``bench.scale_model``) is
calibrated on 2, 4 and 8 of them and held against 16, which it has not seen. Then it plays four ways
to make groups out of a network's peers (``bench.scale_designs``), and draws docs/images/scale-*.
Needs the ``bench`` extra: ``pip install -e .[bench]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import scale_costs, scale_designs, scale_pictures
from bench.scale_calibration import CALIBRATED_ON, Calibration, calibrate, replay
from bench.scale_peers import Seen, Terms, measure

MEASURED = Path(__file__).with_name("scale_measured.json")
IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LINE = "{:>6} {:>14} {:>14} {:>7}"


def measured(sizes: Sequence[int], rounds: int, terms: Terms) -> dict[str, Any]:
    """Everything that takes real peers or this machine's time, to be kept as JSON."""
    seen = []
    for size in sizes:
        for one in measure(size, rounds, terms):
            print(f"{size} real peers: {one}", flush=True)
            seen.append(asdict(one))
    shares, entries = scale_costs.shares(256, 512, 1024), scale_costs.entries()
    return {
        "terms": asdict(terms),
        "rounds": seen,
        "shares": asdict(shares),
        "entries": asdict(entries),
    }


def medians(rounds: Sequence[Seen]) -> list[Seen]:
    """Of each number of peers, figure by figure."""
    by_size: dict[int, list[dict[str, Any]]] = {}
    for one in rounds:
        by_size.setdefault(one.peers, []).append(asdict(one))
    return [
        Seen(**{name: statistics.median(one[name] for one in same) for name in same[0]})
        for _, same in sorted(by_size.items())
    ]


def held_against(calibration: Calibration, real: Sequence[Seen]) -> float:
    """Prints simulated beside real rounds. The largest difference at the sizes held out."""
    worst = 0.0
    for name in ("matchmaking", "transfer", "clock", "bytes", "messages"):
        print(f"\n{name}\n" + LINE.format("peers", "real", "simulated", "off"))
        for one in real:
            true, simulated = getattr(one, name), getattr(replay(calibration, one.peers), name)
            off = simulated / true - 1
            mark = ""
            if one.peers not in CALIBRATED_ON:
                worst, mark = max(worst, abs(off)), "  not calibrated on"
            print(LINE.format(one.peers, f"{true:,.1f}", f"{simulated:,.1f}", f"{off:+.0%}") + mark)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", default="", help="real peers: numbers, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="real rounds of each size")
    parser.add_argument("--seeds", type=int, default=5, help="simulated rounds of each kind")
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    options = parser.parse_args()
    if options.measure:
        sizes = [int(size) for size in options.measure.split(",")]
        kept = measured(sizes, options.rounds, Terms())
        MEASURED.write_text(json.dumps(kept, indent=1) + "\n")
    kept = json.loads(MEASURED.read_text())
    real = medians([Seen(**one) for one in kept["rounds"]])
    calibration = calibrate(real, kept)
    worst = held_against(calibration, real)
    print(f"\nlargest difference where it was not calibrated: {worst:.0%} (goal 15 %)\n")
    scale_pictures.calibration(IMAGES / "scale-calibration.png", calibration, real)
    sizes = [n for n in SIZES if n <= options.largest]
    outcomes = scale_designs.play(sizes, calibration, seeds=options.seeds)
    print(scale_designs.table(outcomes))
    scale_pictures.designs(IMAGES / "scale-designs.png", outcomes)
    scale_pictures.worlds(IMAGES / "scale-worlds.png", outcomes)


if __name__ == "__main__":
    main()
