"""deploy/: what the chart, the compose file and the images say, against the flags and packages.

``default.yaml`` and ``disaggregated.out.yaml`` are the output of ``helm template r
deploy/helm/radixlm --namespace prod [--values tests/deploy/disaggregated.yaml]``, below a line with
the digest of the chart that they were rendered of.
"""

import ast
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from datetime import date
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

import radixlm
from radixlm.config.parser import parse as parse_server
from radixlm.config.server_config import ServerConfig
from radixlm.entrypoints.cli import VERBS
from radixlm.entrypoints.http.admin import health
from radixlm.router.discovery.kubernetes import groups_of
from radixlm.router.options import parse as parse_gateway

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "radixlm"
HERE = Path(__file__).parent
RENDERED = {"default.yaml": [], "disaggregated.out.yaml": ["--values", HERE / "disaggregated.yaml"]}
Manifest = dict[str, Any]


def _digest() -> str:
    made = hashlib.sha256()
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        made.update(str(path.relative_to(CHART)).encode() + path.read_bytes())
    made.update((HERE / "disaggregated.yaml").read_bytes())
    return made.hexdigest()


@pytest.fixture(params=sorted(RENDERED))
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return [one for one in yaml.safe_load_all((HERE / request.param).read_text()) if one]


def _of(manifests: list[Manifest], kind: str, part: str = "") -> list[Manifest]:
    return [m for m in manifests if m["kind"] == kind and part in m["metadata"]["name"]]


@pytest.mark.parametrize("name", sorted(RENDERED))
def test_the_rendered_files_are_of_this_chart(name: str) -> None:
    stamp, _, text = (HERE / name).read_text().partition("\n")
    assert stamp == f"# chart {_digest()}", "the chart has changed: render again, as said above"
    helm = shutil.which("helm")
    if helm is not None:
        command = [helm, "template", "r", CHART, "--namespace", "prod", *RENDERED[name]]
        made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        expected = list(yaml.safe_load_all(text))
        found = list(yaml.safe_load_all(made.stdout))
        key = str
        assert sorted(found, key=key) == sorted(expected, key=key)


def test_selectors_match_their_pods(manifests: list[Manifest]) -> None:
    for one in _of(manifests, "Deployment"):
        wanted = one["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    pods = [one["spec"]["template"] for one in _of(manifests, "Deployment")]
    for service in _of(manifests, "Service"):
        chosen = [p for p in pods if service["spec"]["selector"].items()
                  <= p["metadata"]["labels"].items()]  # fmt: skip
        assert len(chosen) == 1
        names = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_the_gateway_finds_the_workers(manifests: list[Manifest]) -> None:
    (gateway,) = _of(manifests, "Deployment", "gateway")
    pod = gateway["spec"]["template"]["spec"]
    verb, *words = pod["containers"][0]["args"]
    assert verb == "router"
    options = parse_gateway(words)
    workers = [one for one in _of(manifests, "Deployment") if one is not gateway]
    found: list[Manifest] = []
    for group in groups_of(options):
        for one in workers:
            template = one["spec"]["template"]
            if dict(group.selector).items() <= template["metadata"]["labels"].items():
                args = template["spec"]["containers"][0]["args"]
                is_regular = group.worker_type == "regular"
                assert is_regular or f"--disaggregation-mode={group.worker_type}" in args
                found.append(one)
    assert found == workers
    ports = {port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert ports == {options.port, options.prometheus_port}
    assert pod["terminationGracePeriodSeconds"] > options.shutdown_grace_period_secs
    (role,) = _of(manifests, "Role")
    (binding,) = _of(manifests, "RoleBinding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"],
                              "verbs": ["get", "list", "watch"]}]  # fmt: skip
    assert binding["subjects"][0]["name"] == pod["serviceAccountName"]
    assert options.service_discovery_namespace == binding["subjects"][0]["namespace"] == "prod"


def test_the_flags_of_the_workers(manifests: list[Manifest]) -> None:
    (gateway,) = _of(manifests, "Deployment", "gateway")
    options = parse_gateway(gateway["spec"]["template"]["spec"]["containers"][0]["args"][1:])
    for one in _of(manifests, "Deployment"):
        if one is gateway:
            continue
        template = one["spec"]["template"]
        container = template["spec"]["containers"][0]
        verb, *words = container["args"]
        assert verb == "serve"
        config, _ = parse_server(words)
        assert (
            config.serve.port
            == options.service_discovery_port
            == container["ports"][0]["containerPort"]
        )
        annotations = template["metadata"].get("annotations", {})
        port = annotations.get(options.bootstrap_port_annotation)
        assert (port is not None) == (config.disagg.disaggregation_mode == "prefill")
        assert port is None or int(port) == config.disagg.disaggregation_bootstrap_port
        assert bool(config.serve.api_key) == bool(options.api_key)
        is_pair = config.disagg.disaggregation_mode != "null"
        assert (config.parallel.cluster_secret_file is not None) == is_pair
        _check_secret(template["spec"], config.parallel.cluster_secret_file)
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}


def _check_secret(pod: Manifest, path: str | None) -> None:
    """The image's user may read the file: Kubernetes gives it to root, and to the group."""
    if path is None:
        return
    folder, _, key = path.rpartition("/")
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    (volume,) = [v for v in pod["volumes"] if v["name"] == mounts[folder]]
    assert key == "secret" and volume["secret"]["defaultMode"] == 0o400
    assert pod["securityContext"]["fsGroup"] == 10001


def test_the_compose_file() -> None:
    path = ROOT / "deploy" / "compose" / "compose.yaml"
    services = yaml.safe_load(path.read_text())["services"]
    for name in ("gateway", "worker"):
        build = services[name]["build"]
        assert (path.parent / build["context"] / build["dockerfile"]).is_file()
    verb, *words = services["gateway"]["command"]
    options = parse_gateway(words)
    assert verb == "router" and options.discovery_dns == ("worker:30000",)
    assert set(services["gateway"]["ports"]) == {"30000:30000", "29000:29000"}
    assert (options.port, options.prometheus_port) == (30000, 29000)
    verb, *words = services["worker"]["command"]
    config, _ = parse_server([re.sub(r"\$\{.*?\}", "x", word) for word in words])
    assert verb == "serve" and config.serve.port == 30000 and config.observe.enable_metrics
    assert services["worker"]["stop_grace_period"] == "2m" and config.serve.drain_timeout < 120
    scraped = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    assert "names: [worker]" in scraped and 'targets: ["gateway:29000"]' in scraped
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
        for volume in services[name]["volumes"]:
            assert (path.parent / volume.split(":")[0]).exists(), volume


def _command(container: Manifest) -> list[str]:
    """The words of a container after the name of the program."""
    words = [*container.get("command", ()), *container.get("args", ())]
    if words[:2] == ["sh", "-c"]:
        words = shlex.split(words[2].replace('"${HOSTNAME##*-}"', "0"))
    return words[words.index("radixlm") + 1 :] if "radixlm" in words else words


@pytest.mark.parametrize("name", ["server.yaml", "nodes.yaml"])
def test_the_kubernetes_manifests(name: str) -> None:
    """Flags exist, probes ask routes on the server's port, and a drain fits into the grace."""
    text = (ROOT / "deploy" / "kubernetes" / name).read_text()
    manifests = [one for one in yaml.safe_load_all(text) if one]
    (workload,) = [one for one in manifests if one["kind"] in ("Deployment", "StatefulSet")]
    template = workload["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    verb, *words = _command(container)
    config, _ = parse_server(words)
    assert verb == "serve" and config.serve.host == "0.0.0.0"
    routes = {route.path for route in health.router.routes}
    for kind, path in (("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        probe = container[kind]["httpGet"]
        assert probe == {"path": path, "port": config.serve.port} and path in routes
    assert config.serve.port in {port["containerPort"] for port in container["ports"]}
    _, wait_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > float(wait_s) + config.serve.drain_timeout
    assert {one["name"] for one in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    _check_secret(pod, config.parallel.cluster_secret_file)
    labels = template["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    for service in (one for one in manifests if one["kind"] == "Service"):
        for port in service["spec"].get("ports", ()):
            assert port["port"] == config.serve.port
    if scrape := template["metadata"].get("annotations"):
        assert scrape["prometheus.io/port"] == str(config.serve.port)
        assert config.observe.enable_metrics


def _ignored(path: str) -> bool:
    """Whether .dockerignore keeps ``path`` from an image: the last pattern that matches decides."""
    found = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        parts = [path, *(str(one) for one in PurePosixPath(path).parents)]
        patterns = (pattern, pattern.removeprefix("**/"))
        if not line.startswith("#") and any(fnmatch(p, one) for p in parts for one in patterns):
            found = not line.startswith("!")
    return found


def test_dockerignore() -> None:
    made = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = {path for path in made.stdout.split() if not _ignored(path)}
    assert {path for path in kept if path.startswith(("tests/", "docs/", "bench/"))} == set()
    assert {"pyproject.toml", "csrc/bind.cpp", "src/radixlm/py.typed"} <= kept
    for local in (
        "src/radixlm/_cpu.cpython-311-x86_64-linux-gnu.so",
        ".venv/pyvenv.cfg",
        ".git/HEAD",
    ):
        assert _ignored(local), f"{local} of this machine would be in the image"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gateway"])
def test_what_images_copy_is_there(name: str) -> None:
    text = (ROOT / "deploy" / "docker" / name).read_text()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    paths = [path for line in copied if "--from=build" not in line for path in line]
    assert paths and all((ROOT / path).exists() for path in paths)
    for path in paths:
        inside = [ROOT / path, *(ROOT / path).rglob("*")]
        assert not all(_ignored(str(one.relative_to(ROOT))) for one in inside), path
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.M)
    names = [stage for _, stage in stages]
    for image, _ in stages:
        assert image in names or image.startswith("python:")
    assert re.search(r"^USER 10001$", text, re.M) and 'ENTRYPOINT ["radixlm"]' in text
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group in re.findall(r"\.whl\)\[([\w,]+)\]", text):
        assert set(group.split(",")) <= set(extras["optional-dependencies"])
    ports = {int(port) for line in text.splitlines() if line.startswith("EXPOSE ")
             for port in line.split()[1:]}  # fmt: skip
    options = parse_gateway([])
    assert ports == {30000} if name == "Dockerfile" else {options.port, options.prometheus_port}


_BLOCKED = """
import importlib.metadata, importlib.util, pkgutil, re, sys
allowed = {names}
def name_of(text):
    return re.sub(r"[-_.]+", "-", text).lower()
held, todo = set(), [name_of(one) for one in allowed]
while todo:
    one = todo.pop()
    if one in held:
        continue
    held.add(one)
    try:
        needs = importlib.metadata.requires(one) or ()
    except importlib.metadata.PackageNotFoundError:
        continue
    todo += [name_of(re.match(r"[\\w.-]+", need)[0]) for need in needs if "extra ==" not in need]
owners = importlib.metadata.packages_distributions()
class Guard:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        mine = [name_of(one) for one in owners.get(top, ())]
        if mine and "radixlm" not in mine and not held & set(mine):
            raise ModuleNotFoundError(f"{{name}} is not in the gateway's image", name=name)
sys.meta_path.insert(0, Guard())
import radixlm.router
for module in pkgutil.walk_packages(radixlm.router.__path__, "radixlm.router."):
    importlib.import_module(module.name)
from radixlm.router.app import Gateway
from radixlm.router.metrics import RouterMetrics
from radixlm.router.options import parse
Gateway(parse(["--prometheus-port", "-1"]))
RouterMetrics().exposition()
"""


def test_the_packages_of_the_gateways_image_suffice() -> None:
    """Every module of the gateway is imported without any other package."""
    lines = (ROOT / "deploy" / "docker" / "gateway-requirements.txt").read_text().splitlines()
    names = [re.sub(r"\[.*", "", line) for line in lines if not line.startswith("#")]
    code = _BLOCKED.format(names=names)
    ast.parse(code)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    fewer = _BLOCKED.format(names=[name for name in names if name != "httptools"])
    failed = subprocess.run(
        [sys.executable, "-c", fewer], capture_output=True, text=True, timeout=120, check=False
    )
    assert "httptools is not in the gateway's image" in failed.stderr


def test_the_systemd_unit() -> None:
    """What it runs exists, and systemd understands it."""
    path = ROOT / "deploy" / "systemd" / "radixlm.service"
    lines = dict(
        line.split("=", 1) for line in path.read_text().splitlines() if re.match(r"[A-Z]\w+=", line)
    )
    _, verb, args = lines["ExecStart"].split()
    assert verb in VERBS and args == "$RADIXLM_ARGS"
    assert float(lines["TimeoutStopSec"]) > ServerConfig().serve.drain_timeout
    if (tool := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([tool, "verify", str(path)], capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if path.name in line]
    assert all("not executable" in line for line in told), told


def test_versions_agree() -> None:
    """Package, chart, alias and the newest dated section of the changelog."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == radixlm.__version__
    alias = tomllib.loads((ROOT / "compat" / "sglang" / "pyproject.toml").read_text())
    assert alias["project"]["version"] == radixlm.__version__
    heads = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    for page in ("README.md", "docs/deployment.md"):
        named = set(re.findall(r"radixlm-(\d+\.\d+\.\d+)-", (ROOT / page).read_text()))
        assert named == {radixlm.__version__}, page
    assert heads[0] == ("Unreleased", "")
    assert heads[1][0] == radixlm.__version__ and date.fromisoformat(heads[1][1])


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gateway"])
def test_hadolint_takes_the_images(name: str) -> None:
    """But for versions, which are the distribution's and those of pyproject.toml."""
    path = ROOT / "deploy" / "docker" / name
    command = ["hadolint", "--ignore", "DL3008", "--ignore", "DL3013", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_kubernetes_schemas_take_the_manifests(manifests: list[Manifest]) -> None:
    """Those of the package kubernetes-validate, of the chart's output too."""
    validate = pytest.importorskip("kubernetes_validate")
    for name in ("server.yaml", "nodes.yaml"):
        text = (ROOT / "deploy" / "kubernetes" / name).read_text()
        manifests += [one for one in yaml.safe_load_all(text) if one]
    for one in manifests:
        if "coreos" not in one["apiVersion"]:
            validate.validate(one, validate.latest_version(), strict=True)
