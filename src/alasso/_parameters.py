"""A model's protected parameters: their names, as the user knows them, and a state for each.

Parameters come and go: heads grow, layers thaw, pruning renames weights, models move to other devices. What is known of
them is brought up to date by :meth:`ProtectedParameters.look`, and a parameter's state by
:meth:`ProtectedParameters.state_of`.
"""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from alasso._compile import is_recording
from alasso._distributed import agreed, is_sharded, local, reshard
from alasso._state_dict import from_saved, state_dtype
from alasso.errors import AlassoError, DivergedError, warn
from alasso.methods.base import Surrogate

Names = str | Iterable[str] | None  # shell-style patterns of parameters' names

MOST_NAMED = 8  # parameters in one sentence
COMPILED = "_orig_mod."  # torch.compile's mark in names of submodules: compiled or not, a state fits


class ProtectedParameters:
    """The parameters of one model that are protected, by name, with their states.

    Iterating gives (name, parameter) of every parameter that trains or has a past.

    Attributes:
        model: The module that the user wrote, without wrappers.
        surrogate: What makes states, and makes them larger.
        exclude: Patterns of names that are left alone.
        include: Patterns of names that are protected; none for all.
        states: The state of each parameter by its name.
        version: Counts changes: whoever works something out from states, settings or names compares it.
    """

    def __init__(self, model: nn.Module, surrogate: Surrogate[Any], exclude: object, include: object) -> None:
        self.model = unwrapped(model)
        self.surrogate = surrogate
        self.exclude, self.include = patterns_of("exclude", exclude), patterns_of("include", include)
        if include is not None and not self.include:
            raise AlassoError("include names nothing to protect; leave it out to protect all parameters")
        self.states: dict[str, Any] = {}
        self.version = 0
        self._forget_addresses()
        check_patterns(self.model, exclude=self.exclude, include=self.include)
        if not self._chosen():
            raise AlassoError("exclude leaves nothing of the model to protect")
        check_kinds(self._chosen())
        self.look()

    def _forget_addresses(self) -> None:
        """Drop what is known of parameters by where they lie; it is looked up at the next use."""
        self._names: dict[int, tuple[str, nn.Parameter]] | None = None  # held, so that no other comes to lie there
        self._seen: dict[str, ref[nn.Parameter]] = {}
        self._replaced: set[str] = set()  # took the place of others, and nobody has been warned yet

    def __getstate__(self) -> dict[str, Any]:
        """Copy without addresses: a copy looks at its own model, when that is complete."""
        kept = ("model", "surrogate", "exclude", "include", "states", "version")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_addresses()

    # -- names -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        trained = []
        for name, parameter in self._by_address().values():
            if parameter.requires_grad or name in self.states:
                trained.append((name, parameter))
        return iter(trained)

    def named(self) -> dict[str, nn.Parameter]:
        """Return all parameters of real numbers that the patterns choose, frozen ones, too."""
        return {name: parameter for name, parameter in self._chosen() if parameter.is_floating_point()}

    def _chosen(self) -> list[tuple[str, nn.Parameter]]:
        """Return each parameter once, by its first name, if any of its names is included, and none is excluded."""
        left_out = ids_of(self.model, self.exclude)
        wanted = ids_of(self.model, self.include) if self.include else None
        chosen = []
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in left_out and (wanted is None or id(parameter) in wanted):
                chosen.append((name.replace(COMPILED, ""), parameter))
        return chosen

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the name under which a parameter is known, None if it is not."""
        known = self._by_address().get(id(parameter))
        return None if known is None else known[0]

    def _by_address(self) -> dict[int, tuple[str, nn.Parameter]]:
        if self._names is None:
            self.look()
        assert self._names is not None
        return self._names

    def look(self, at_anchors: bool = False) -> dict[str, nn.Parameter]:
        """Look at the model again: parameters may have been added, unfrozen, renamed or replaced.

        Args:
            at_anchors: Whether the model's weights were the anchors when they were last seen.

        Returns:
            Every parameter that trains or has a past, by name.
        """
        reshard(self.model)
        named = self.named()
        self._rename(named)
        names = {}
        for name, parameter in named.items():
            names[id(parameter)] = name, parameter
            if (seen := self._seen.get(name)) is None or (old := seen()) is not parameter:
                if seen is not None and self._begins_anew(name, parameter, old, at_anchors):
                    self._replaced.add(name)
                self._seen[name] = ref(parameter)
        if self._names is None or names.keys() != self._names.keys():
            self.version += 1
        self._names = names
        known = dict(self)
        for name, parameter in known.items():
            self.state_of(name, parameter)
        return known

    def _rename(self, named: Mapping[str, nn.Parameter]) -> None:
        """Keep what is remembered under a parameter's old name: pruning a layer, say, gives its weight another."""
        if gone := self._seen.keys() - named.keys():
            new_names = {id(parameter): name for name, parameter in named.items() if name not in self._seen}
            for old in gone:
                new = new_names.get(id(self._seen.pop(old)()))
                if new is not None and old in self.states:
                    self.put(new, self.states.pop(old))

    def _begins_anew(self, name: str, parameter: nn.Parameter, old: nn.Parameter | None, at_anchors: bool) -> bool:
        """Return whether a parameter took the place of one that matters, and was not made from it."""
        state = self.states.get(name)
        if state is None or not self.surrogate.has_past(state):
            return False
        if is_sharded(parameter) or (old is not None and is_sharded(old)):
            return False  # shards are made anew whenever the model is gathered or sharded
        known = [weights for weights in (old, state.anchor if at_anchors else None) if weights is not None]
        return bool(known) and not any(begins_with(parameter, weights) for weights in known)

    def warn_of_replaced(self) -> None:
        """Warn once of parameters that are pulled to where others were."""
        names, self._replaced = sorted(self._replaced), set()
        if names:
            were = "was replaced by a new parameter" if len(names) == 1 else "were replaced by new parameters"
            warn(
                f"{some_of(names)} {were} since the last task, and the past still pulls to the old values. For a new "
                "head call reg.forget(parameter) for each, or exclude it from the start: exclude='head.*'"
            )

    def warn_of_strayed(self) -> None:
        """Warn if weights differ from the anchors of a state that was loaded."""
        known = [(name, local(p), self.state_of(name, p)) for name, p in self]
        matter = {
            name: begins_with(theta, state.anchor) for name, theta, state in known if self.surrogate.has_past(state)
        }
        if strayed := [name for name, holds in matter.items() if not holds]:
            which = some_of(strayed) if len(strayed) < len(matter) else "the model's weights"
            warn(
                f"{which} differ from the anchors in the loaded state, so training will be pulled toward the old "
                "weights; call model.load_state_dict(...) as well, and reg.forget(p) for parameters that should start "
                "fresh"
            )

    # -- states ----------------------------------------------------------------------------------------------

    def put(self, name: str, state: Any) -> None:
        """Make this the state kept under a name."""
        self.states[name] = state
        self.version += 1

    def put_all(self, states: Mapping[str, Any]) -> None:
        """Make these the states kept under their names."""
        self.states.update(states)
        self.version += 1

    def end_task(self, states: Mapping[str, Any]) -> None:
        """Take over the states that a task ended with, and the present parameters as they are."""
        self.states.update(states)
        self.version += 1
        self._replaced.clear()

    def state_of(self, name: str, parameter: nn.Parameter) -> Any:
        """Return a parameter's state, made at first sight, on the parameter's device and in its size."""
        state, theta = self.states.get(name), local(parameter)
        precision = theta.dtype if self.surrogate.anchors_as_weights else state_dtype(theta)
        if (
            state is None
            or state.anchor.shape != theta.shape
            or state.anchor.device != theta.device
            or state.anchor.dtype != precision
        ):
            state = self._fitted(name, state, parameter, precision)
            self.put(name, state)
        return state

    @torch.inference_mode(False)  # whoever asks: steps to come write to the state
    @torch.no_grad()
    def _fitted(self, name: str, state: Any, parameter: nn.Parameter, precision: torch.dtype) -> Any:
        theta = weights_of(parameter)
        if state is None:
            state = self.surrogate.init(theta)
        if state.anchor.shape != theta.shape and state.anchor.shape == parameter.shape:
            partial = self.surrogate.partial  # the model was sharded since
            state = type(state)(**{f: from_saved(t, parameter, f in partial) for f, t in state._asdict().items()})
            if not all(self.surrogate.fits(f, t, tuple(theta.shape)) for f, t in state._asdict().items()):
                raise AlassoError(f"{name} was sharded, and its state cannot be: make the regularizer after sharding")
        if state.anchor.shape != theta.shape:
            check_growth(name, state.anchor.shape, theta.shape)
            state = self.surrogate.grown(state, theta)
        state = moved_like(state, theta)
        return state._replace(anchor=state.anchor.to(precision))

    def check_states(self, names: Iterable[str]) -> None:
        """Refuse states that are not finite: nobody could load them."""
        states = {name: self.states[name] for name in names if name in self.states}
        tensors = {f"{field} of {name}": t for name, state in states.items() for field, t in state._asdict().items()}
        check_finite(tensors, self.named().values(), "in the state to save")

    def check_finite(self, step: int) -> None:
        """Refuse weights that are not finite, and so what was seen of the steps of the task."""
        tensors = {}
        for name, parameter in self:
            tensors[name] = local(parameter).detach()
            if (state := self.states.get(name)) is not None:  # not one that has just been thawed
                fields = state._asdict().items()
                tensors |= {f"{field} of {name}": t for field, t in fields if field not in ("anchor", "omega")}
        check_finite(tensors, self.named().values(), f"before step {step} of the task")

    @torch.no_grad()
    def reset(self) -> None:
        """Begin every path at the weights as they are; nothing was learned before the first step."""
        for name, parameter in self:
            if is_recording(parameter.device):
                raise AlassoError("the first step of all begins the path: make one before recording a CUDA graph")
            state = self.state_of(name, parameter)
            theta = local(parameter).detach().to(state.anchor.dtype)
            if not torch.equal(state.anchor, theta):
                self.put(name, state._replace(anchor=theta.clone()))

    def forget(self, parameter: nn.Parameter) -> None:
        """Begin one parameter's state anew; it may have taken the place of another, of any shape."""
        if not isinstance(parameter, nn.Parameter):
            raise AlassoError(f"forget() takes a parameter itself, as model.head.weight, not {parameter!r:.40}")
        name = next((name for name, own in self.named().items() if own is parameter), None)
        if name is None or not (parameter.requires_grad or name in self.states):
            raise AlassoError("this parameter is not protected; pass one of the regularizer's own model")
        # Look at this one alone: others of the same layer may be about to be forgotten, too.
        others = {place: known for place, known in self._by_address().items() if known[0] != name}
        self._names = {**others, id(parameter): (name, parameter)}
        self._seen[name] = ref(parameter)
        self._replaced.discard(name)
        self.put(name, self.surrogate.init(weights_of(parameter)))


# -- one tensor ------------------------------------------------------------------------------------------------


def weights_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's weights in the precision of their state."""
    theta = local(parameter).detach()
    return theta.to(state_dtype(theta))


def moved_like(state: Any, theta: Tensor) -> Any:
    """Return the state on θ's device and in θ's precision; integer fields keep their type."""
    return type(state)(*(t.to(theta.device, theta.dtype if t.is_floating_point() else t.dtype) for t in state))


def check_growth(name: str, old: torch.Size, new: torch.Size) -> None:
    """Refuse a parameter that did anything but grow."""
    if len(old) != len(new) or any(n < m for n, m in zip(new, old, strict=True)):
        raise AlassoError(
            f"{name} changed from shape {tuple(old)} to {tuple(new)}; a parameter may grow, not shrink: "
            "if it is to begin anew, pass it to forget() first"
        )


def check_importance(
    importance: Iterable[tuple[str, Tensor]],
    parameters: Mapping[str, Tensor],
    others: Mapping[str, Tensor] = types.MappingProxyType({}),
) -> None:
    """Refuse importance that is not finite, or zero everywhere, on all ranks alike.

    Args:
        importance: By the parameters' names.
        parameters: The parameters themselves, which tell the ranks.
        others: Scalars that must be finite as well: how far the task has moved a parameter, how stiff it becomes.

    Raises:
        AlassoError: It is zero everywhere.
        DivergedError: It is not finite.
    """
    names, flags = [], [0]  # whether any importance is not zero; then by tensor, whether it is not finite
    for name, omega in importance:
        names.append(name)
        # No tensor of its size is made beside it, and none is kept while the next one is made.
        largest = torch.linalg.vector_norm(omega, torch.inf) if omega.numel() else omega.new_zeros(())
        del omega
        flags[0] |= int(bool(largest))
        flags.append(int(not torch.isfinite(largest + others.get(name, 0.0))))
    # A rank sees its own shards alone, but either all ranks continue or none does.
    any_importance, *odd = agreed(flags, parameters.values())
    for name, is_odd in zip(names, odd, strict=True):
        if is_odd:
            raise DivergedError(
                f"importance of {name} is NaN or infinite: the training diverged (are the inputs finite? a smaller "
                "learning rate, c or lam helps, and a larger xi), or a setting lets it overflow; the regularizer "
                "keeps its earlier state, but reload model, optimizer and regularizer from before this task to "
                "continue"
            )
    if not any_importance:
        raise AlassoError(
            "importance is zero for every weight: nothing was learned that could be protected "
            "(did the weights move, and did gradients reach them?)"
        )


@torch.no_grad()
def check_finite(tensors: Mapping[str, Tensor], parameters: Iterable[Tensor], when: str) -> None:
    """Refuse tensors that are not finite, on all ranks alike; look at nothing while a CUDA graph is recorded.

    Args:
        tensors: By what they are called; each is read once, and the device is waited for once.
        parameters: Tell the ranks.
        when: Says in the message when they were looked at.

    Raises:
        DivergedError: One is not finite.
    """
    kept = {name: t for name, t in tensors.items() if t.is_floating_point()}
    if not kept or any(is_recording(t.device) for t in kept.values()):
        return
    norms = torch._foreach_norm(list(kept.values()))
    seem_fine = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).isfinite().tolist()
    # A norm may overflow where no number does.
    flags = [int(not fine and not t.isfinite().all()) for t, fine in zip(kept.values(), seem_fine, strict=True)]
    for name, is_odd in zip(kept, agreed(flags, parameters), strict=True):
        if is_odd:
            raise DivergedError(
                f"{name} is NaN or infinite {when}: the training diverged (are the inputs finite? a smaller learning "
                "rate, c or lam helps, and a larger xi); to continue, load model, optimizer and regularizer as they "
                "were before that"
            )


def begins_with(theta: Tensor, before: Tensor) -> bool:
    """Return whether θ holds these weights, or is a larger one that holds them first; to the lesser precision."""
    if theta.dim() != before.dim() or any(n < m for n, m in zip(theta.shape, before.shape, strict=True)):
        return False
    block = theta.detach()[tuple(slice(0, n) for n in before.shape)]
    dtype = min(theta.dtype, before.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(block.to(before.device, dtype), before.detach().to(dtype))


# -- names and patterns ----------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module the user wrote, inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def all_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter), a tied parameter under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name.replace(COMPILED, ""), parameter


def ids_of(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    """Return which parameters have a name that fits one of the patterns."""
    if not patterns:
        return set()
    return {id(p) for name, p in all_names(model) if any(fnmatch.fnmatchcase(name, one) for one in patterns)}


def some_of(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are.

    >>> some_of(["a", "b"]), some_of([str(i) for i in range(10)])
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def patterns_of(argument: str, given: object) -> tuple[str, ...]:
    """Return the patterns given as an argument: one, several, or None."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    patterns = tuple(given) if isinstance(given, Iterable) and not isinstance(given, nn.Module) else (given,)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise AlassoError(f"{argument} takes patterns of names, as 'head.*', not {type(pattern).__name__}")
    return patterns


def check_patterns(model: nn.Module, **given: Sequence[str]) -> None:
    """Refuse a pattern, given by its argument's name, that fits nothing: it is not what was meant."""
    names = [name for name, _ in all_names(model)]
    if not names:
        raise AlassoError("the model has no parameters to protect")
    for argument, pattern in ((argument, pattern) for argument, several in given.items() for pattern in several):
        if not fnmatch.filter(names, pattern):
            below = f"{pattern.rstrip('.')}.*"
            guess = f"did you mean {below!r}, or another of" if fnmatch.filter(names, below) else "the model has"
            raise AlassoError(f"{argument}={pattern!r} matches no parameter; {guess} {some_of(names)}")


def check_kinds(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that have no shape yet; warn of those that cannot be protected."""
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise AlassoError(f"{name} has no shape yet: send a batch through the model first")
    if complex_ones := [name for name, parameter in parameters if parameter.is_complex()]:
        warn(f"complex weights are not protected: {some_of(complex_ones)}")
