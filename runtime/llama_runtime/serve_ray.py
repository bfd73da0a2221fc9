"""Replicas of the server on Ray Serve: one on each device, more of them while requests queue up.

serve run llama_runtime.serve_ray:application bundle=/srv/smollm2-135m device=cuda max_replicas=4

Ray places and restarts the replicas, routes HTTP to them and scales between `min_replicas` and
`max_replicas`; each one loads the bundle for itself, so the folder must be there on every machine.
Needs the extra `ray`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from llama_artifacts.errors import InputError
from llama_artifacts.extras import needs

NAME = "llama-export"
APP = "llama_runtime.server.run:open_app"


@dataclass(frozen=True)
class Replicas:
    """How many replicas run, where, and how loaded they are.

    Attributes:
        min_replicas: that are always there.
        max_replicas: at most, as requests need them.
        target_requests: in flight in each replica; Ray adds replicas while there are more.
        max_requests: in flight in one replica; beyond it they wait in Ray's router.
        device: `cpu`, or `cuda` for one GPU each.
        cpus: cores that Ray reserves for a replica.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: int = 32
    max_requests: int = 256
    device: str = "cpu"
    cpus: int = 1

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            # Ray shows each replica one GPU, whose number is therefore 0.
            raise InputError(f"expected cpu or cuda, got {self.device!r}", where="device")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "device" and (type(value) is not int or value < 1):
                raise InputError(f"expected a number from 1, got {value!r}", where=field.name)
        if self.min_replicas > self.max_replicas:
            message = f"expected at least min_replicas = {self.min_replicas}"
            raise InputError(f"{message}, got {self.max_replicas}", where="max_replicas")


def application(arguments: Mapping[str, Any]) -> Any:
    """What Ray Serve runs: `serve run` calls this, as does `ray.serve.run(application({...}))`.

    Args:
        arguments: `bundle`, its folder; those of `Replicas`; `app`, which makes the server's ASGI
            application (`module:function`); all others are passed to that function, after the
            bundle. Texts that are JSON, such as `16` or `true`, are taken for what they say.

    Returns:
        A `ray.serve.Application`.

    Raises:
        InputError: no bundle, or a value that is out of range.
        CompatibilityError: Ray Serve is not installed.
    """
    values = {name: _parsed(value) for name, value in arguments.items()}
    bundle, app = values.pop("bundle", None), values.pop("app", APP)
    if not isinstance(bundle, str):
        raise InputError(f"expected a folder, got {bundle!r}", where="bundle", hint="bundle=FOLDER")
    own = {field.name for field in fields(Replicas)}
    replicas = Replicas(**{name: values.pop(name) for name in own & values.keys()})
    build = _builder(app, bundle, {"device": replicas.device, **values})
    with needs("ray"):
        from ray import serve

    deployment = serve.deployment(
        name=NAME,
        ray_actor_options={
            "num_cpus": replicas.cpus,
            "num_gpus": 1 if replicas.device == "cuda" else 0,
        },
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_requests,
        },
        max_ongoing_requests=replicas.max_requests,
    )
    return deployment(serve.ingress(build)()).bind()


def _builder(app: Any, bundle: str, options: Mapping[str, Any]) -> Callable[[], Any]:
    module, _, name = str(app).partition(":")
    if not module or not name:
        raise InputError(f"expected MODULE:FUNCTION, got {app!r}", where="app")

    def build() -> Any:
        """Runs in each replica."""
        return getattr(importlib.import_module(module), name)(bundle, **options)

    return build


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
