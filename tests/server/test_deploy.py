"""What is installed around a server fits it: the unit of systemd, the probe of the image, nginx."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from repository import ROOT

from hypocenter.base.errors import MissingPackage
from hypocenter.cli.app import app
from hypocenter.server.app import OPEN_PATHS, TABLE
from hypocenter.server.metrics import Metrics
from hypocenter.server.serve import ServerConfig
from hypocenter.wire.messages import EngineState

DEPLOY = ROOT / "deploy"
UNIT = ROOT / "deploy" / "hypocenter.service"
PAGE = (ROOT / "docs" / "production.md").read_text()


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(UNIT.read_text().replace("\\\n", " "))
    return parser["Service"]


def test_the_unit_drains_reloads_and_gives_the_time_that_this_takes() -> None:
    service = unit()
    assert service["KillMode"] == "mixed"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/hypo")
    grace = float(words[words.index("--grace") + 1])
    assert grace == ServerConfig.grace_seconds
    assert grace + 10 < int(service["TimeoutStopSec"]) <= grace + 30
    command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    assert command.__name__ == "serve"
    assert bound.arguments["server"].api_key_file == "/etc/hypocenter/keys"
    written = (bound.arguments["server"].bundles, service["Environment"])
    assert written[0].startswith(f"/var/lib/{service['StateDirectory']}/")
    assert "MemoryDenyWriteExecute" not in service  # it makes machine code


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "hypocenter.service"
    copy.write_text(UNIT.read_text().replace("/opt/hypocenter/bin/hypo", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_probe_of_the_image_tells_a_server_that_is_well_from_others() -> None:
    found = re.findall(r"^HEALTHCHECK .*\\\n +(\[.*\])$", (ROOT / "Dockerfile").read_text(), re.M)
    assert len(found) == 2, "each image has one"
    assert len(set(found)) == 1
    [_, flag, code] = json.loads(found[0].removeprefix("CMD "))
    statuses = [200, 503]

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0) if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = code.replace("127.0.0.1:8080", f"127.0.0.1:{server.server_port}")
        codes = [
            subprocess.run([sys.executable, flag, here], stderr=subprocess.DEVNULL).returncode
            for _ in range(2)
        ]
        server.shutdown()
    assert codes == [0, 1]


@pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx")
def test_nginx_reads_what_the_page_has_for_it(tmp_path: Path) -> None:
    [block] = re.findall(r"^```nginx\n(.*?)^```", PAGE, re.S | re.M)
    tls = ROOT / "tests/fixtures/tls/one"
    block = re.sub(r"/etc/hypocenter/cert\.(pem|key)", rf"{tls}.\1", block)
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/error;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{block}}}\n"
    )
    done = subprocess.run(
        ["nginx", "-t", "-c", config], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_events_of_the_page_are_those_that_are_told() -> None:
    told = set()
    for path in (ROOT / "src/hypocenter").rglob("*.py"):
        told |= set(re.findall(r"\btell\(\s*(?:logging\.\w+|level),\s*\"(\w+)\"", path.read_text()))
    told |= {"request", "log_lines_lost"}
    table = re.search(r"^\| event \|.*?(?=^$)", PAGE, re.S | re.M)
    assert table
    first = [line.split("|")[1] for line in table[0].splitlines()[2:]]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert named <= told, named - told


def served_words(words: list[str]) -> Any:
    """The options of `hypo serve` that these words are; they must be words that it knows."""
    command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    assert command.__name__ == "serve"
    return bound.arguments["server"]


def exported() -> set[str]:
    """Each name that /metrics has, as Prometheus stores it."""
    replica = SimpleNamespace(
        number=0,
        facts=SimpleNamespace(block_size=16, num_blocks=9),
        state=EngineState(),
        is_ready=True,
        is_lost=False,
    )
    supervisor: Any = SimpleNamespace(replicas=[replica], of_clients=[])
    text = Metrics(supervisor, "m", lambda: 0).text().decode()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def test_the_compose_file_starts_what_there_is_and_scrapes_it() -> None:
    told = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    own = told["services"]["hypocenter"]
    options = served_words(own["command"])
    assert options.replicas == 2
    assert options.grace + 10 < float(own["stop_grace_period"].rstrip("s")) <= options.grace + 30
    stages = re.findall(r"^FROM \S+ AS (\w+)", (ROOT / "Dockerfile").read_text(), re.M)
    assert own["build"]["target"] in stages
    assert "/ready" in own["healthcheck"]["test"][-1]
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    [target] = scraped["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in told["services"]
    assert host in options.allowed_host
    assert int(port) == options.port
    assert scraped["metrics_path"] in {entry.path for entry in TABLE}
    mounted = [volume.split(":") for volume in told["services"]["prometheus"]["volumes"]]
    assert ["./prometheus.yml", "/etc/prometheus/prometheus.yml", "ro"] in mounted
    key = scraped["authorization"]["credentials_file"]
    [source] = [one[0] for one in mounted if one[1] == key]
    assert told["secrets"]["keys"]["file"] == source
    assert set(own["secrets"]) == {"keys"}
    assert options.api_key_file == "/run/secrets/keys"


def test_the_manifests_probe_drain_and_mount_what_is_named() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    options = served_words(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe, path in (
        ("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready"),
    ):  # fmt: skip
        asked = container[probe]["httpGet"]
        assert asked["path"] == path
        assert path in {entry.path for entry in TABLE}
        assert ports[asked["port"]] == options.port
    # Both answer without a key, to whatever name a probe calls them by.
    assert {"/health", "/ready"} <= OPEN_PATHS
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert options.grace + 10 < grace <= options.grace + 30
    assert container["resources"]["limits"]["nvidia.com/gpu"] == options.replicas
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert Path(options.api_key_file).parent == Path(mounts["keys"])
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["targetPort"] in ports


def test_each_figure_of_the_dashboard_is_one_that_is_exported() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"(?:vllm|hypocenter):\w+", expr)}
    assert len(names) > 12
    assert names <= exported(), names - exported()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    told = (ROOT / "docs" / "production.md").read_text()
    assert set(re.findall(r"hypocenter:\w+", told)) - exported() == {"hypocenter:nvidia"} & set(
        re.findall(r"hypocenter:\w+", told)
    )


def test_without_ray_the_application_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "hypocenter.ray.application", raising=False)
    with pytest.raises(MissingPackage, match=r"needs ray, .* pip install 'hypocenter\[ray\]'"):
        importlib.import_module("hypocenter.ray.application")
