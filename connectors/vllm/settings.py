"""`kv_connector_extra_config`, parsed once."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.errors import ConfigError

__all__ = ["Settings"]


class Settings(BaseModel):
    """What `--kv-transfer-config` may say under `kv_connector_extra_config`.

    Attributes:
        target: address of the daemon; "" is the default daemon's socket.
        tenant: engines of different tenants share no blocks.
        model: name of the model in the store; "" takes vLLM's.
        weights_version: names the weights, and those of a draft model. "" samples the checkpoint's
            files, which does not notice weights that are changed in place while the engine runs.
        block_tokens: tokens per stored block, rounded up to whole engine blocks.
        step_wait_seconds: how long a scheduling step may wait for answers, in all.
        answer_seconds: how long the daemon may take to open the space, and to answer a request.
        disk_wait_seconds: how long a request may wait for blocks on disk.
        min_load_tokens: shorter hits are recomputed.
        hold_seconds: how long a request that cannot be allocated keeps its lease.
        credit_bytes: most memory reserved ahead for blocks that are not computed yet, of each
            adapter in use.
        idle_credit_bytes: of it, what is kept while no request runs, of all adapters together.
        store: whether to store what the engine computes.
        load: whether to load.
        early_loads: on a GPU, whether a load may be reported to an idle engine before its bytes are
            there. Should its slots be taken back in those milliseconds (an epoch is bumped, say),
            the engine stops rather than give a wrong token.
        pool_wait_seconds: on a GPU, how long an engine that starts waits at most for the daemon's host
            memory to be made and pinned, so that this does not disturb it once it serves. 0: memory is
            made when it is needed, and not waited for.
        store_factory: `module:callable` that makes the client, instead of `kvstore.Client`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = ""
    tenant: str = ""
    model: str = ""
    weights_version: str = ""
    block_tokens: int = Field(default=128, ge=1, le=1 << 20)
    step_wait_seconds: float = Field(default=0.003, ge=0, le=1)
    answer_seconds: float = Field(default=0.5, gt=0, le=60)
    disk_wait_seconds: float = Field(default=2.0, ge=0, le=60)
    min_load_tokens: int = Field(default=1, ge=1)
    hold_seconds: float = Field(default=2.0, gt=0)
    credit_bytes: int = Field(default=1 << 30, ge=0)
    idle_credit_bytes: int = Field(default=64 << 20, ge=0)
    store: bool = True
    load: bool = True
    early_loads: bool = True
    pool_wait_seconds: float = Field(default=20.0, ge=0, le=600)
    store_factory: str = ""

    @classmethod
    def parse(cls, extra: dict[str, Any]) -> Settings:
        """Check the extra config.

        Raises:
            ConfigError: one line naming the first key that is wrong.
        """
        try:
            return cls.model_validate(extra)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"kv_connector_extra_config.{where}: {first['msg']} (got {first['input']!r})"
            ) from error
