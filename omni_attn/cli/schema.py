"""`omni-attn schema`: the JSON Schema of the pipeline YAML."""

from __future__ import annotations


def schema() -> None:
    """Print the JSON Schema of the pipeline YAML, for editors and other checkers."""
    from omni_attn.cli.console import print_json
    from omni_attn.config import PipelineConfig

    print_json(PipelineConfig.model_json_schema())
