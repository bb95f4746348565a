"""Every error a person can cause, in one tree.

OmniAttnError
  ConfigError(ValueError)            unknown key or name, bad value, an option on a backend that does not own it
  BackendRejectedError(ValueError)   an explicit choice cannot run here: role, backend, source, reasons, alternatives
  NoBackendError(RuntimeError)       no candidate was accepted: the text holds every verdict
  BackendImportError(ImportError)    an optional package is missing or broken; its own error is chained
  MissingExtraError(ImportError)     a library of an extra, outside attention itself, is not installed
  MetadataError(ValueError)          the input of a step does not fit what the layer or the backend can express
  KVCacheError(RuntimeError)         no room for what a step adds to a KV cache, or pages used against its rules
  ParallelError(RuntimeError)        another of the processes that share a sequence failed: its error, on every one

Each text says what was asked, why it cannot be, and what to do. The command line prints it and exits with 2.
This module imports nothing, so that every other one can raise from here.
"""

from __future__ import annotations


class OmniAttnError(Exception):
    """Base of all errors that omni_attn raises on purpose."""


class ConfigError(OmniAttnError, ValueError):
    """A configuration is wrong.

    Args:
        problems: one line per problem, each with its place (file, line, key path) where that is known.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BackendRejectedError(OmniAttnError, ValueError):
    """A backend that a person chose cannot serve this layer on this machine.

    Attributes:
        role, backend, source: what was asked for, and where.
        reasons: why it cannot be.
        alternatives: names that the platform's default order would accept.
    """

    def __init__(
        self,
        text: str,
        *,
        role: str = "",
        backend: str = "",
        source: str = "",
        reasons: tuple[str, ...] = (),
        alternatives: tuple[str, ...] = (),
    ) -> None:
        super().__init__(text)
        self.role, self.backend, self.source = role, backend, source
        self.reasons, self.alternatives = reasons, alternatives


class NoBackendError(OmniAttnError, RuntimeError):
    """Not one candidate of the platform's default order can serve this layer.

    Attributes:
        verdicts: one per candidate, each with its reasons.
    """

    def __init__(self, verdicts: tuple[object, ...], text: str) -> None:
        super().__init__(verdicts, text)
        self.verdicts = verdicts

    def __str__(self) -> str:
        return str(self.args[1])


class BackendImportError(OmniAttnError, ImportError):
    """An accepted backend's optional package could not be imported or lacks a needed symbol."""


class MissingExtraError(OmniAttnError, ImportError):
    """A library of the `pipelines` or `viz` extra is missing; the text ends with the command that installs it."""


class MetadataError(OmniAttnError, ValueError):
    """The tensors or the record of one step do not fit; the text names both sides."""


class KVCacheError(OmniAttnError, RuntimeError):
    """A KV cache has no room for more tokens or streams, or a page or stream is used out of turn."""


class ParallelError(OmniAttnError, RuntimeError):
    """A process that shares the sequence failed, and the others stop with it; each raises the same text.

    Attributes:
        rank: of the process that failed first.
        exit_code: 2 where it met an error of this tree, else 1; what the others end with too.
        first: what that process says itself; empty where it says nothing any more.
    """

    def __init__(self, text: str, *, rank: int = 0, exit_code: int = 1, first: str = "") -> None:
        super().__init__(text)
        self.rank, self.exit_code, self.first = rank, exit_code, first
