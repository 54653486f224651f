"""site.yml: the first run serves, the second changes nothing, check mode agrees, and two at once do not
meet.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from lab.api import Lab
from lab.playbook import ANSIBLE, ROOT, playbook
from tests.lab.conftest import API, HEAD, UNIT, WORKER, Pair, Run, play


def test_the_first_run_ends_with_an_answer(site: Run, pair: Pair) -> None:
    """Prevents a green run without a model that talks."""
    assert site.code == 0
    assert "Paris" in site.output
    assert f"{API}/v1" in site.output
    assert "Paris" in pair.ask()
    for host in (HEAD, WORKER):
        assert pair.unit(host, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
        assert len(pair.containers(host)) == 1


def test_the_second_run_changes_nothing_and_restarts_nothing(lab: Lab, pair: Pair) -> None:
    """Prevents a pair that is restarted because somebody ran the playbook again."""
    before = pair.status()
    run = play(lab, "site.yml")
    assert (run.code, run.changed) == (0, 0), run.output[-3000:]
    after = pair.status()
    assert (after["epoch"], after["since"]) == (before["epoch"], before["since"])


def test_ansible_runner_does_the_same(lab: Lab, pair: Pair, tmp_path: Path) -> None:
    """Prevents a pipeline that needs other commands than the ones in the README."""
    before = pair.status()
    argv = [str(ANSIBLE.with_name("ansible-runner")), "run", str(tmp_path), "--project-dir", str(ROOT)]
    argv += ["--inventory", str(lab.inventory), "-p", "site.yml"]
    _, environment = playbook(lab, "site.yml")
    environment["PATH"] = (
        f"{ANSIBLE.parent}:{environment['PATH']}"  # an activated environment, as the README says
    )
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    run = Run(code=done.returncode, output=done.stdout + done.stderr)
    assert (run.code, run.changed) == (0, 0), run.output[-3000:]
    assert pair.status()["since"] == before["since"]


def test_check_mode_on_a_finished_pair_reports_no_change(lab: Lab, pair: Pair) -> None:
    """Prevents a dry run that cries wolf, and one that says other things than the head's own plan."""
    before = pair.status()
    run = play(lab, "site.yml", "--check", "--diff")
    assert (run.code, run.changed) == (0, 0), run.output[-3000:]
    plan = pair.sh(HEAD, "glm53", "artifacts", "plan", "--user", "spark").splitlines()
    assert [line.partition(":")[0] for line in plan] == [HEAD, WORKER] * 2
    assert [": all there (" in line for line in plan] == [True, True, False, False]
    assert all("image" in line and ": there (" in line for line in plan[2:])
    assert all(line in " ".join(run.output.split()) for line in plan)
    assert pair.status()["since"] == before["since"]


def test_a_wrong_setting_leaves_the_serving_pair_alone(lab: Lab, pair: Pair) -> None:
    """Prevents an outage by a typing error."""
    before = pair.status()
    run = play(lab, "site.yml", "-e", '{"glm53_vllm": {"max_model_len": "4k", "kv_cache_memory": "128M"}}')
    assert run.code != 0
    assert "vllm.max_model_len: found '4k'" in " ".join(run.output.split())
    after = pair.status()
    assert (after["epoch"], after["since"], after["ready"]) == (before["epoch"], before["since"], True)


def test_of_two_runs_at_once_one_wins_and_the_other_names_it(lab: Lab, pair: Pair) -> None:
    """Prevents two people from restarting one pair in each other's half."""
    argv, environment = playbook(lab, "site.yml")
    runs = [
        subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    codes = [run.returncode for run in runs]
    assert sorted(code != 0 for code in codes) == [False, True], "\n\n".join(o[-1500:] for o in outputs)
    loser = " ".join(outputs[codes.index(0) ^ 1].split())
    assert re.search(r"since \d{4}-\d\d-\d\d", loser), loser[-1500:]
    assert pair.status()["ready"]


def test_the_owners_own_keys_stay(lab: Lab, pair: Pair) -> None:
    """Prevents a locked-out owner: a key whose comment looked like ours was once replaced by ours."""
    own = (lab.paths.ssh / "id_ed25519.pub").read_text().strip()
    for host in (HEAD, WORKER):
        lines = pair.sh(host, "cat", "/home/spark/.ssh/authorized_keys").splitlines()
        assert own in lines
        assert sum(line.startswith('restrict,from="') for line in lines) == (0 if host == HEAD else 1)


def test_settings_on_the_nodes_are_the_heads_alone(pair: Pair) -> None:
    """Prevents a worker with settings of its own, a token that others read, and a status that only root
    gets.
    """
    assert pair.sh(HEAD, "stat", "-c", "%U:%G %a", "/etc/glm53/settings.yaml", "/etc/glm53/token").split(
        "\n"
    )[:2] == ["root:glm53 644", "root:root 600"]
    shown = pair.sh(HEAD, "runuser", "-u", "spark", "--", "glm53", "status")
    assert "serving" in shown
    assert pair.lab.exec(WORKER, ["test", "-e", "/etc/glm53/settings.yaml"], check=False).returncode == 1


def test_units_are_what_systemd_accepts(pair: Pair) -> None:
    """Prevents a misspelt key, which systemd only warns about."""
    for host in (HEAD, WORKER):
        done = pair.lab.exec(
            host, ["systemd-analyze", "verify", "--recursive-errors=no", f"{UNIT[host]}.service"]
        )
        assert done.stderr.strip() == ""
