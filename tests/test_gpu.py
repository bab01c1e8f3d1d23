"""What can't be seen without a GPU: determinism, resume, bfloat16 and a process group on CUDA, at the 10M shape."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prepare

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here that torch can use")
ARMS = ("FullResidual", "AttnOnly", "FFNOnly", "NoResidual")
FLAGS = ("--dataset=text", "--seeds=0", "--max_iters=60", "--eval_interval=30", "--log_interval=1")
FLAGS += ("--eval_tokens=65536", "--device=cuda")


def train(place, out, *flags, torchrun=False, stop=None):
    """Train residual_10m into place/out -> exit status. stop: text of the line at which SIGTERM is sent."""
    program = [sys.executable, *(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"] * torchrun)]
    program += [str(ROOT / "train.py"), str(ROOT / "config/residual_10m.py"), f"--out_dir={out}", *FLAGS, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(program, cwd=place, **pipes) as process:
        for line in process.stdout:
            if stop and stop in line:
                process.terminate()
    return process.returncode


def rows(place, out, arm):
    return [json.loads(line) for line in (place / out / arm / "seed0/log.jsonl").read_text().splitlines()]


def same_bits(place, a, b, arm):
    one, two = (torch.load(place / out / arm / "seed0/ckpt.pt", weights_only=True) for out in (a, b))
    one, two = (ckpt["model"] | {"window_losses": ckpt["window_losses"]} for ckpt in (one, two))
    return all(torch.equal(one[k], two[k]) for k in one)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data/text and the four arms trained into `first`."""
    folder = tmp_path_factory.mktemp("gpu")
    prepare.main(["pydocs", f"--out={folder}/data/text"])
    assert train(folder, "first") == 0
    return folder


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_learns_in_bfloat16(place, arm):
    first, *_, last = rows(place, "first", arm)
    assert last["status"] == "finished" and last["config"]["dtype"] == "bfloat16"
    assert last["val_loss"] < first["val_loss"]


def test_two_runs_have_the_same_bits(place):
    assert train(place, "second", "--arms=FullResidual,FFNOnly") == 0
    assert all(same_bits(place, "first", "second", arm) for arm in ("FullResidual", "FFNOnly"))


def test_a_stopped_run_resumes_to_the_bit(place):
    assert train(place, "third", "--arms=FullResidual", stop="step 30/") == 143
    step = torch.load(place / "third/FullResidual/seed0/state.pt", weights_only=True)["step"]
    assert 30 < step < 60
    assert train(place, "third", "--arms=FullResidual") == 0
    assert same_bits(place, "first", "third", "FullResidual")


def test_a_process_group_takes_the_same_steps(place):
    assert train(place, "fourth", "--arms=FullResidual", torchrun=True) == 0
    alone, group = ([row["loss"] for row in rows(place, out, "FullResidual")[:20]] for out in ("first", "fourth"))
    assert group == pytest.approx(alone, abs=0.01)
