"""The quick start: four tenants share one resident backbone, on real simulators, on a machine without a GPU.

    make demo                                        # sets everything up, then runs this
    python examples/quickstart/demo.py --isolated    # the same tenants one after the other, each alone

First the simulator's own planner makes demonstrations (nothing is downloaded; they are kept for the next time). Then
`joynexus run` starts a local service and runs, at the same time: one SFT tenant with an evaluation, two ManiSkill RL
tenants and one LIBERO RL tenant.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from joynexus.data.demonstrations import generate_demonstrations
from joynexus.types import ViewSpec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TENANTS = ("push_cube_sft", "push_cube_rl", "pick_cube_rl", "libero_rl")
NUM_DEMONSTRATIONS = 40
SHOW_EVERY_S = 10.0


def make_demonstrations() -> None:
    """Record demonstrations of PushCube-v1, or find those of an earlier run."""
    started, shown = time.monotonic(), 0.0

    def progress(kept: int, tried: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown > SHOW_EVERY_S or kept == NUM_DEMONSTRATIONS:
            shown = now
            print(f"  {kept} of {NUM_DEMONSTRATIONS} demonstrations ({tried} tried, {now - started:.0f} s)", flush=True)

    print("demonstrations of PushCube-v1, by the simulator's own planner", flush=True)
    view = ViewSpec(cameras=("base_camera",), image_size=(64, 64))
    path = generate_demonstrations(
        "PushCube-v1", ROOT / "demos" / "quickstart", num_episodes=NUM_DEMONSTRATIONS, view=view, progress=progress
    )
    print(f"  {path.relative_to(ROOT)}", flush=True)


def run_tenants(output: Path, extra: Sequence[str]) -> int:
    """Run the four tenants with the command line, and return its exit code."""
    files = [str(HERE / f"{name}.yaml") for name in TENANTS]
    service = ["--service", str(HERE / "service.yaml"), "--local", "--num-cpus", "2", "--output", str(output)]
    return subprocess.run(
        [sys.executable, "-m", "joynexus.cli", "run", *files, *service, *extra], check=False
    ).returncode


def show_results(output: Path) -> None:
    """Say where everything is, and what sharing did."""
    service = json.loads((output / "summary.json").read_text())["service"]
    groups = service["group_batches"]
    print(f"\nsummary   {output / 'summary.json'}\nplot      {output / 'run.png'}")
    for video in sorted(output.rglob("*.mp4")):
        print(f"video     {video}")
    print(f"curves    tensorboard --logdir {output}")
    print(
        f"\n{service['training_samples']} samples were trained on and {service['backbone_samples']} prefixes encoded; "
        f"a training batch held {groups['training']['mean_tenants']:.2f} tenants on average, "
        f"an inference batch {groups['inference']['mean_tenants']:.2f}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the quick start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder of this run; default: a new one under outputs/")
    options, extra = parser.parse_known_args(arguments)
    name = datetime.now(UTC).strftime("quickstart-%Y%m%d-%H%M%S")
    output = (options.output or ROOT / "outputs" / name).resolve()
    make_demonstrations()
    code = run_tenants(output, extra)
    if (output / "summary.json").exists():
        show_results(output)
    return code


if __name__ == "__main__":
    sys.exit(main())
