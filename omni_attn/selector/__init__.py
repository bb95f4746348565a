"""Selection of a backend for a role."""

from omni_attn.selector.scope import (
    CollectedLayer,
    collect_attention_requests,
    current_scope,
    use_attention_config,
)
from omni_attn.selector.selector import (
    PLATFORM_DEFAULT,
    Selection,
    get_attn_backend_for_role,
    later_fallbacks,
    log_selection,
    select,
)

__all__ = [
    "PLATFORM_DEFAULT",
    "CollectedLayer",
    "Selection",
    "collect_attention_requests",
    "current_scope",
    "get_attn_backend_for_role",
    "later_fallbacks",
    "log_selection",
    "select",
    "use_attention_config",
]
