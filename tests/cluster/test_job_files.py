"""Job files for Slurm and Kubernetes; test_slurm.py runs the one for Slurm."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.chaos.simulated_nodes import simulated_nodes, simulation_unavailable_reason
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.addresses import wait_for_name
from zero2all.cli.main import app
from zero2all.cluster.job_files import JobResources, indexed_job, slurm_script
from zero2all.cluster.launch.job_secret import new_secret
from zero2all.cluster.launch.launcher import LaunchConfig

WORDS = ["train", "my recipe.yaml", "train.steps=5"]
PLAIN = JobResources()


def emit(kind: str, *options: str) -> str:
    done = CliRunner().invoke(app, ["launch", "--procs", "8", "--nodes", "4", *options, "--emit", kind, "--", *WORDS])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_slurm_script_quotes_and_is_written(tmp_path: Path) -> None:
    to = tmp_path / "job.sh"
    words = ["launch", "--procs", "8", "--nodes", "2", "--emit", "slurm"]
    script = CliRunner().invoke(app, [*words, "--", *WORDS]).stdout
    assert json.loads(CliRunner().invoke(app, [*words, "--json", "--", *WORDS]).stdout)["text"] == script
    to.write_text(script, encoding="utf-8")
    assert (
        'until z2a launch --nproc-per-node 8 --rdzv-endpoint "$Z2A_HEAD:29500" --nnodes 2:2 --grace 110 '
        "-- train 'my recipe.yaml' train.steps=5; do" in script
    )
    assert subprocess.run(["bash", "-n", str(to)]).returncode == 0
    assert "--signal=B:USR1@120 " in script
    assert "\n#SBATCH --no-kill" not in script
    elastic = slurm_script(LaunchConfig(WORDS, 8, (2, 4), "head:29500"), PLAIN)
    assert "\n#SBATCH --no-kill" in elastic
    assert "--kill-on-bad-exit=0 --no-kill bash" in elastic
    asked = LaunchConfig(WORDS, 8, (2, 2), "head:1", max_restarts=2, hang_after=3600, grace=290)
    script = slurm_script(asked, JobResources("big", gpus=8))
    assert "--rdzv-endpoint head:1 --nnodes 2:2 --max-restarts 2 --hang-after 3600 --grace 290 -- train" in script
    assert "--signal=B:USR1@300 " in script, "the ranks have the time that Slurm gives, minus a margin"
    assert "#SBATCH --gpus-per-node=8\n#SBATCH --gres-flags=enforce-binding" in script
    assert "#SBATCH --job-name=big\n" in script


CPU_RECIPE = "name: small\ntrain: {steps: 5, device: cpu}\n"


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        (["train", "my.yaml"], 8),
        (["train", "my.yaml", "train.device=cuda"], 8),
        (["train", "elsewhere.yaml"], 8),
        (["python", "script.py", "--lr=3"], 8),
        (["train", "cpu.yaml"], 0),
        (["train", "my.yaml", "train.device=cpu"], 0),
        (["train", "elsewhere.yaml", "train.device=cpu"], 0),
    ],
)
def test_a_job_requests_a_gpu_for_each_rank_unless_the_recipe_is_for_the_cpu(
    command: list[str], gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("name: small\ntrain: {steps: 5}\n")
    Path("cpu.yaml").write_text(CPU_RECIPE)
    words = ["launch", "--nproc-per-node", "8", "--nnodes", "2", "--emit"]
    found = {kind: CliRunner().invoke(app, [*words, kind, "--", *command]).stdout for kind in ("slurm", "k8s")}
    asked = [line for line in found["slurm"].splitlines() if line.startswith("#SBATCH --gpus-per-node")]
    assert asked == ([f"#SBATCH --gpus-per-node={gpus}"] if gpus else [])
    assert (f"nvidia.com/gpu: {gpus}\n" in found["k8s"]) == bool(gpus)


def run_script(script: str, tmp_path: Path, srun: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With commands of Slurm that do as told."""
    scontrol = 'echo "scontrol $*" >&2; echo head-node'
    scancel = f'[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat {tmp_path}/srun.pid)'
    for name, text in (("srun", srun), ("scontrol", scontrol), ("scancel", scancel)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    known = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={**known, **environment}, timeout=60
    )


def test_the_slurm_script_gives_the_nodes_a_secret(tmp_path: Path) -> None:
    script = slurm_script(LaunchConfig(WORDS, procs=8, nodes=(2, 2)), PLAIN)
    runs = [run_script(script, tmp_path, 'echo "$Z2A_JOB_SECRET"; echo "$@"') for _ in range(2)]
    (first, *words), (second, *_) = (done.stdout.splitlines() for done in runs)
    assert len(first) == 64, runs[0].stderr
    assert first != second
    assert first not in " ".join(words), "ps would show it"
    named = slurm_script(LaunchConfig(WORDS, 8, (2, 2), secret_file=Path("/home/me/my secret")), PLAIN)
    assert "--secret-file '/home/me/my secret'" in named
    assert "Z2A_JOB_SECRET=" not in named


@pytest.mark.parametrize(
    ("signal", "agent_status", "restarts", "requeued"),
    [
        ("USR1", 1, "0", True),  # the time limit: it has saved
        ("USR1", 0, "0", False),  # it was done in time
        ("USR1", 1, "100", False),  # enough
        ("TERM", 1, "0", False),  # scancel
    ],
)
def test_the_slurm_script_requeues_only_at_the_time_limit(
    signal: str, agent_status: int, restarts: str, requeued: bool, tmp_path: Path
) -> None:
    script = slurm_script(LaunchConfig(WORDS, procs=1), PLAIN)
    # Slurm signals the shell of the batch script, which is the parent of srun; scancel without a signal srun too.
    srun = f"trap 'exit {agent_status}' TERM\necho $$ >{tmp_path}/srun.pid\nkill -{signal} $PPID\n"
    srun += "kill -TERM $$" if signal == "TERM" else "while true; do sleep 0.05; done"
    done = run_script(script, tmp_path, srun, SLURM_RESTART_COUNT=restarts)
    # bash may lose the status of a child that ends in the moment of the signal, as here at scancel.
    assert done.returncode == agent_status or (signal == "TERM" and done.returncode), done.stderr
    assert ("scontrol requeue 7" in done.stderr) == requeued


def test_an_agent_that_was_killed_is_started_again_on_its_node(tmp_path: Path) -> None:
    script = slurm_script(LaunchConfig(WORDS, procs=1), PLAIN)
    (tmp_path / "z2a").write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/starts\n[ -e {tmp_path}/stop ] && exit 1\n'
                                  f"touch {tmp_path}/stop; kill -9 $$\n")  # fmt: skip
    (tmp_path / "z2a").chmod(0o755)
    srun = 'while [[ $1 == -* ]]; do shift; done; "$@"'
    assert run_script(script, tmp_path, srun).returncode == 1, "an agent that gives up is not"
    lines = (tmp_path / "starts").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("-- train my recipe.yaml train.steps=5")


def documents(text: str) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_an_indexed_job_for_kubernetes() -> None:
    found = documents(emit("k8s", "--job-name", "big", "--grace", "200"))
    job, service, policy = (found[kind] for kind in ("Job", "Service", "NetworkPolicy"))
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    line = shlex.join(container["command"])
    assert line.startswith("z2a launch --nproc-per-node 8 --rdzv-endpoint big-0.big:29500 --rdzv-timeout 600 ")
    assert line.endswith(
        "--nnodes 4:4 --secret-file /run/z2a/secret --grace 200 -- train 'my recipe.yaml' train.steps=5"
    )
    assert (pod["subdomain"], service["metadata"]["name"], service["spec"]["clusterIP"]) == ("big", "big", "None")
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == policy["spec"]["podSelector"]["matchLabels"]
    assert pod["terminationGracePeriodSeconds"] >= 200
    assert pod["restartPolicy"] == "Never", "the API refuses a pod failure policy with another"
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert (rules[1]["action"], rules[1]["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert mounts["/run/z2a"]["secret"]["defaultMode"] & 0o007 == 0, "z2a refuses a secret that all can read"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    with pytest.raises(UsageError, match="leave out --advertise"):
        indexed_job(LaunchConfig(WORDS, 8, (2, 2), advertise="10.0.0.1"), PLAIN)
    with pytest.raises(UsageError, match="becomes a host name"):
        JobResources("My Job")


@pytest.mark.parametrize("nodes", [(1, 1), (2, 4)])
def test_the_schema_of_kubernetes_accepts_the_job(nodes: tuple[int, int]) -> None:
    """Strictly: a field that the API does not have is an error."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    text = indexed_job(LaunchConfig(WORDS, 8, nodes, max_restarts=3), JobResources(gpus=8))
    for document in yaml.safe_load_all(text):
        validate.validate(document, "1.31", strict=True)
    wrong = documents(text)["Job"]
    wrong["spec"]["podFailurePolicies"] = wrong["spec"].pop("podFailurePolicy")
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.31", strict=True)


def test_the_name_of_a_pod_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Z2aError, match=r"no route to no-such-pod\.invalid:29500"):
        wait_for_name("no-such-pod.invalid:29500", patience=0.1)
    assert "waiting up to 0 s for the name of no-such-pod.invalid" in capsys.readouterr().err
    wait_for_name("127.0.0.1:29500", patience=0)


@pytest.mark.slow
@pytest.mark.skipif(
    simulation_unavailable_reason() is not None,
    reason=f"nodes cannot be simulated here: {simulation_unavailable_reason()}",
)
def test_the_command_of_the_pods_runs_on_two_nodes(tmp_path: Path) -> None:
    """The command line and environment of the manifest; pod 0 gets its name only once the other one waits for it."""
    script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)"
    (tmp_path / "show.py").write_text(script)
    (tmp_path / "secret").write_text(new_secret())
    (tmp_path / "secret").chmod(0o440)
    config = LaunchConfig(["python", "show.py"], procs=1, nodes=(2, 2))
    job = documents(indexed_job(config, JobResources("pods")))["Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [sys.executable, "-m", "zero2all.cli", *container["command"][1:]]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with simulated_nodes(2) as pods:
        running = []
        for index in (1, 0):
            pod = pods[index]
            pod.run("mount", "-t", "tmpfs", "tmpfs", "/run")  # the secret volume
            pod.run("install", "-D", "-m", "440", str(tmp_path / "secret"), "/run/z2a/secret")
            line = pod.command("env", f"--chdir={tmp_path}", f"JOB_COMPLETION_INDEX={index}", *command)
            running.append(
                subprocess.Popen(line, env=environment, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True)
            )  # fmt: skip
        waiting = running[0].stdout
        assert "waiting up to 600 s for the name of pods-0.pods:29500" in waiting.readline()
        for pod in pods:
            pod.run("sh", "-c", f"echo '{pods[0].ip} pods-0.pods' >>/etc/hosts")
        output = [process.communicate(timeout=120)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0], output
        assert sorted(line for text in output for line in text.splitlines() if line.startswith("rank")) == [
            "rank 0 of 2",
            "rank 1 of 2",
        ]
