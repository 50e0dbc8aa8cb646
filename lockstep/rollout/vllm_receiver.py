"""vLLM's side of a refit, in this process: proved against the engine's own loader, loaded layer by layer, compared.

    begin    registry refuses what it can't refresh; before_plan state; every name and every live value accounted for
    receive  before_load state; complete units go through vLLM's own loaders into poisoned staging, then in place;
             from the second refit on straight in place, where every layer kept its layout (``vllm_direct.py``)
    commit   vLLM's post-processing, after_load state, and only then the new version
    resume   requests are admitted again
    abort    the old tensors are put back in place; they may be a mixture, so the engine serves nothing

The registry of derived state is handed in (``DerivedState``): it belongs to the refit, not to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from lockstep.interfaces import WeightSource
from lockstep.records import DerivedReport, Manifest, Naming, Original, Quantisation, TensorSpec
from lockstep.rollout.receiver import RefitHost, RefitRefused, arriving
from lockstep.rollout.vllm_direct import DirectCopy
from lockstep.rollout.vllm_hooks import served_model
from lockstep.rollout.vllm_layout import LiveLayout
from lockstep.rollout.vllm_plan import LoadPlan, plan_load
from lockstep.rollout.vllm_reload import LayerwiseReload


class DerivedState(Protocol):
    """State that an engine derives from its weights or its layout, which no checkpoint brings."""

    def refusals(self, engine: Any) -> tuple[str, ...]:
        """Why this engine must not be refitted; empty if it may."""
        ...

    def before_plan(self, engine: Any) -> tuple[DerivedReport, ...]:
        """Repair what the loader itself consults."""
        ...

    def before_load(self, engine: Any) -> tuple[DerivedReport, ...]:
        """Remove what would make a reload skip its work; the engine can't serve until the load is over."""
        ...

    def after_load(self, engine: Any) -> tuple[DerivedReport, ...]:
        """Rebuild, in place, what is computed from the weights."""
        ...

    def check(self, engine: Any) -> tuple[DerivedReport, ...]:
        """Compare with a rebuild and change nothing."""
        ...


class VllmHost(RefitHost, Protocol):
    """What this receiver asks its engine besides."""

    @property
    def weights_away(self) -> bool:
        """Whether it sleeps and the memory of its weights is given back."""
        ...


class VllmReceiver:
    """``interfaces.WeightReceiver`` of an in-process ``vllm.LLM`` with one worker. One refit at a time.

    ``derived`` None: no registry, as some other trainer would drive this engine. Raises ReloadUnsupported if this vLLM
    has no layer-wise reload.
    """

    def __init__(
        self, llm: Any, host: VllmHost, derived: DerivedState | None, quantisation: Quantisation = "none"
    ) -> None:
        self._llm = llm
        self._quantisation: Quantisation = quantisation
        self._host = host
        self._derived = derived
        self._reload = LayerwiseReload()
        self._reload.note_layout_buffers(served_model(llm))
        self._manifest: Manifest | None = None
        self._plan: LoadPlan | None = None
        self._planned: tuple[object, ...] = ()
        self._layout: LiveLayout | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._held: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._copied: set[str] = set()
        self._received: set[str] = set()
        self._repaired: tuple[DerivedReport, ...] = ()
        self._loading = False
        self._direct: DirectCopy | None = None
        self._composed: tuple[DirectCopy, Mapping[str, Original], DirectCopy | None] | None = None
        self._addresses: dict[str, int] = {}

    @property
    def naming(self) -> Naming:
        """vLLM's loaders read published checkpoints' names; fused expert stacks pass them by in silence."""
        return "checkpoint"

    @property
    def quantisation(self) -> Quantisation:
        """The scheme of the manifests that it takes: codes and scales go through vLLM's own loaders."""
        return self._quantisation

    @property
    def copies_directly(self) -> bool:
        """Whether the last commit left every layer as it was loaded, so that the next refit copies straight in."""
        return self._direct is not None

    def begin(self, manifest: Manifest) -> None:
        """Prove the manifest both ways. Raises RefitRefused with every problem by name, and leaves weights, version and
        caches as they were (a wrong expert map is repaired first, since the loader's answers depend on it)."""
        if self._manifest is not None:
            raise RuntimeError(f"a refit to version {self._manifest.version} has begun and is not over")
        if self._host.weights_away:
            raise RefitRefused(
                f"refit to version {manifest.version} refused: the engine sleeps and the memory of its weights is "
                'given back; wake(["weights"]) comes first'
            )
        if manifest.quantisation != self._quantisation:
            raise RefitRefused(
                f"manifest of version {manifest.version} is quantised {manifest.quantisation!r}, this engine serves "
                f"{self._quantisation!r} (rollout.quantisation)"
            )
        if manifest.base_version is not None:
            raise RefitRefused(
                f"manifest of version {manifest.version} is a subset over version {manifest.base_version}: vLLM "
                "reloads whole layers, so it takes full manifests only"
            )
        if self._derived is not None:
            if refusals := self._derived.refusals(self._llm):
                raise RefitRefused(f"refit to version {manifest.version} refused: " + "; ".join(refusals))
            with self._configured():
                self._repaired = self._derived.before_plan(self._llm)
        shape = (tuple((s.name, s.shape, s.dtype) for s in manifest.tensors), tuple(manifest.tied.items()))
        if self._plan is None or self._planned != shape:
            with self._configured():
                self._plan = plan_load(self._model, manifest, self._reload)
            self._planned = shape
            self._direct = None
        if self._direct is not None and self._layout is not None and self._layout.addresses() != self._addresses:
            self._direct = None  # a parameter was replaced since: copies would go where nobody looks
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._received, self._copied, self._held = set(), set(), {}
        self._manifest = manifest
        try:
            self._host.refit_begun()
        except BaseException as error:
            self.abort(f"version {manifest.version} could not be begun: {error}")
            raise

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors; may be called several times (buckets). They need to live until the call returns, no longer:
        what waits for its other half (gate for up, an expert stack's rest) is copied."""
        manifest = self._begun()
        try:
            if self._direct is not None:
                with torch.no_grad():
                    self._direct.copy(self._arriving(manifest, tensors))
                return
            with self._configured(), self._reload.poisoned_staging(), torch.no_grad():
                self._start_loading()
                self._model.load_weights(self._complete_units(manifest, tensors))  # pyright: ignore[reportCallIssue]
            self._keep_held()
        except BaseException as error:
            self.abort(f"the transfer of version {manifest.version} broke off: {error}")
            raise

    def receive_originals(self, source: WeightSource, originals: Mapping[str, Original]) -> int | None:
        """Copy a source's tensors, which hold the manifest's as ``originals`` says, straight into place: their bytes.
        None, with nothing done, where the way in is not straight."""
        manifest = self._begun()
        if self._direct is None:
            return None
        arrivals = _Originals(source, originals, self._received, manifest.version)
        try:
            if self._composed is None or self._composed[0] is not self._direct or self._composed[1] is not originals:
                _check_parts(originals, self._specs, manifest.version)
                self._composed = (self._direct, originals, self._direct.composed(originals))
            if self._composed[2] is None:
                return None
            with torch.no_grad():
                self._composed[2].copy(arrivals)
        except BaseException as error:
            self.abort(f"the transfer of version {manifest.version} broke off: {error}")
            raise
        return arrivals.num_bytes

    def alias(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refused: vLLM computes from layouts of its own."""
        raise RefitRefused("vLLM's weights can't alias the trainer's, since kernels have their own layouts: use local")

    def commit(self) -> tuple[DerivedReport, ...]:
        """Post-process, rebuild derived state, take up the new version. Raises if a tensor never arrived or a layer was
        not wholly loaded; the engine is unfit then."""
        manifest, plan = self._begun(), self._planned_load()
        try:
            if absent := [name for name in self._specs if name not in self._received]:
                raise RefitRefused(f"refit to version {manifest.version}: never arrived: {', '.join(absent[:20])}")
            with self._configured(), self._reload.poisoned_staging(), torch.no_grad():
                if self._direct is None:
                    self._finish_loading(plan)
                    self._reload.finalize(self._model, self._model_config)
                    self._loading = False
                after = () if self._derived is None else self._derived.after_load(self._llm)
            if self._direct is None:
                self._layout = LiveLayout(self._model, plan, self._reload)
                # Without a registry nobody rebuilds what vLLM's post-processing would have derived.
                self._direct = None if self._derived is None else DirectCopy.of(self._layout)
                self._addresses = {} if self._direct is None else self._layout.addresses()
        except BaseException as error:
            self.abort(f"version {manifest.version} could not be committed: {error}")
            raise
        self._manifest = None
        self._host.refit_committed(manifest.version)
        return (*self._repaired, *after)

    def resume(self) -> None:
        """Admit requests again."""
        self._host.refit_over()

    def abort(self, reason: str) -> None:
        """Give up: the engine serves nothing until a refit commits."""
        self._manifest = None
        self._held = {}
        try:
            if self._loading:
                self._loading = False
                self._reload.cancel(self._model)
        finally:
            self._host.refit_aborted(reason)

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Live weights under checkpoint names where vLLM's layout can be undone. Raises RuntimeError before a commit:
        only a manifest says what the engine's parts are called."""
        return self._committed().live()

    def opaque(self) -> dict[str, str]:
        """The other names, each with the reason. Live tensors that no tensor of the manifest fills are among them under
        their own names, counted anew each time: they were never sent, and fail the claim ``covered``."""
        return self._committed().opaque() | self._committed().unfilled()

    def reload_differences(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str | None]]:
        """Load opaque layers a second time by vLLM's own loaders and compare bytes."""
        layout = self._committed()
        with self._configured():
            yield from layout.differences(tensors)

    def derived(self) -> tuple[DerivedReport, ...]:
        """Compare the registry's state with a rebuild."""
        if self._derived is None:
            return ()
        with self._configured(), torch.no_grad():
            return self._derived.check(self._llm)

    def weights_given_up(self) -> None:
        """The engine sleeps without its weights: the next refit loads through vLLM's own loader again."""
        self._direct = None

    def refresh_after_wake(self) -> tuple[DerivedReport, ...]:
        """Run the registry on weights that were kept: sleep gives back memory, and derived tensors with it."""
        if self._derived is None:
            return ()
        with self._configured(), torch.no_grad():
            return (*self._derived.before_plan(self._llm), *self._derived.after_load(self._llm))

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _model(self) -> torch.nn.Module:
        return served_model(self._llm)

    @property
    def _model_config(self) -> Any:
        return self._llm.llm_engine.model_config

    @contextmanager
    def _configured(self) -> Iterator[None]:
        """vLLM's layers read a process-wide configuration while they load and post-process."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

        with set_current_vllm_config(self._llm.llm_engine.vllm_config):
            yield

    def _begun(self) -> Manifest:
        if self._manifest is None:
            raise RuntimeError("no refit has begun: call begin(manifest) first")
        return self._manifest

    def _planned_load(self) -> LoadPlan:
        if self._plan is None:
            raise RuntimeError("no manifest was accepted yet")
        return self._plan

    def _committed(self) -> LiveLayout:
        if self._layout is None:
            raise RuntimeError("no refit was committed yet: the engine's weights have no checkpoint names")
        return self._layout

    def _start_loading(self) -> None:
        if self._loading:
            return
        self._loading = True
        if self._derived is not None:
            self._repaired += self._derived.before_load(self._llm)
        self._reload.initialize(self._model)
        for path in self._planned_load().bypassed:
            # Their loader writes straight into parameters: those need storage before, and processing after.
            self._reload.stage_now(self._model.get_submodule(path))

    def _complete_units(
        self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What belongs together, once all of it is here."""
        plan = self._planned_load()
        for name, tensor in self._arriving(manifest, tensors):
            unit = plan.unit[name]
            waiting = self._held.setdefault(unit, [])
            # vLLM loads a layer with padding only when all is over, and keeps what it was given until then.
            late = not plan.layers[name].isdisjoint(plan.padded)
            waiting.append((name, tensor.detach().clone() if late else tensor.detach()))
            if len(waiting) == plan.unit_size[unit]:
                yield from self._held.pop(unit)

    def _arriving(
        self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor, checked against its manifest and counted."""
        for name, tensor in tensors:
            arriving(name, tensor, self._specs, self._received, manifest.version)
            self._received.add(name)
            yield name, tensor

    def _keep_held(self) -> None:
        """Copy what still waits: the transport may use its buffers again."""
        for waiting in self._held.values():
            for index, (name, tensor) in enumerate(waiting):
                if name not in self._copied:
                    waiting[index] = (name, tensor.clone())
                    self._copied.add(name)

    def _finish_loading(self, plan: LoadPlan) -> None:
        """Process what the layer-wise reload could not see, and prove that every planned layer was loaded."""
        for path in plan.bypassed:
            self._reload.process(self._model.get_submodule(path))
        for path in {path for paths in plan.layers.values() for path in paths}:
            left = self._reload.unfinished(self._model.get_submodule(path))
            if left is not None and (left[0] == 0 or (left[0] < left[1] and path not in plan.padded)):
                raise RefitRefused(f"{path}: the loader wrote {left[0]} of {left[1]} values")


def _check_parts(originals: Mapping[str, Original], specs: Mapping[str, TensorSpec], version: int) -> None:
    """Raises RefitRefused unless what lies in the originals is of the manifest, by name, shape and dtype: geometries of
    another shape would be read from the wrong places."""
    for name, original in originals.items():
        for part, (size, _, _) in original.parts:
            spec = specs.get(part)
            if spec is None:
                raise RefitRefused(f"{part} lies in {name} but is not in the manifest of version {version}")
            if (size, original.spec.dtype) != (spec.shape, spec.dtype):
                raise RefitRefused(
                    f"{part} lies in {name} as {original.spec.dtype} {size}, its manifest says {spec.dtype} "
                    f"{spec.shape}"
                )


class _Originals:
    """Each whole tensor of a source, checked against what was announced; what it holds is added to ``received``."""

    def __init__(
        self, source: WeightSource, originals: Mapping[str, Original], received: set[str], version: int
    ) -> None:
        self._source, self._originals, self._received, self._version = source, originals, received, version
        self._specs = {name: original.spec for name, original in originals.items()}
        self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        arrived: set[str] = set()
        for name, _, _, tensor in self._source.shards():
            arriving(name, tensor, self._specs, arrived, self._version)
            arrived.add(name)
            self._received |= self._originals[name].names
            self.num_bytes += tensor.nbytes
            yield name, tensor
