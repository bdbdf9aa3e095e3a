"""The examples, as a person runs them: exit code 0, and workers that agree."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from atoll.trees import digest, trainable

EXAMPLES = Path(__file__).parent.parent / "examples"


def digests(*commands: list[str | Path]) -> dict[int, str]:
    """Run the commands side by side; what each worker printed at its end."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        output = [process.communicate(timeout=110)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(output)
    # two processes may write on one line
    ends = re.findall(r"worker (\d+): .*?digest ([0-9a-f]{64})", "\n".join(output))
    return {int(worker): seen for worker, seen in ends}


def test_a_loop_of_ones_own_ends_alike_in_threads_and_under_torchrun() -> None:
    script, steps = EXAMPLES / "own_loop.py", ["--steps", "50"]
    threads = digests([script, "--workers", "2", *steps])
    processes = digests(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *steps])
    assert sorted(threads) == [0, 1]
    assert len(set(threads.values())) == 1
    assert processes == threads


def test_the_same_loop_on_islands_far_apart_ends_as_in_threads() -> None:
    steps = ["--steps", "50"]
    islands = digests([EXAMPLES / "wide_loop.py", "--islands", "2", *steps])
    assert sorted(islands) == [0, 1]
    assert islands == digests([EXAMPLES / "own_loop.py", "--workers", "2", *steps])


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.sh")), ids=lambda path: path.name)
def test_a_shell_script_can_be_read_by_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


def test_two_processes_of_the_hugging_face_script_agree_and_resume_bit_for_bit(tmp_path: Path) -> None:
    command = [EXAMPLES / "hf_trainer.py", "--out", tmp_path]
    whole = digests(command)
    assert sorted(whole) == [0, 1]
    assert len(set(whole.values())) == 1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert digest(trainable(exported)) == whole[0]
    for worker in range(2):
        last = max((tmp_path / f"worker-{worker}").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
        shutil.rmtree(last)
    with socket.create_server(("localhost", 0)) as free:
        command += ["--resume", "--address", f"localhost:{free.getsockname()[1]}"]
    assert digests(*([*command, "--worker", str(worker)] for worker in range(2))) == whole
