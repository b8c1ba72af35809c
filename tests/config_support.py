"""Configurations with some settings changed."""

from dataclasses import fields, replace

from exporter.config import AgentConfig


def configured(config: AgentConfig, **changes: object) -> AgentConfig:
    """Return a copy with other settings, each in the group that has it."""
    groups = {part.name: getattr(config, part.name) for part in fields(config) if part.name != "warnings"}
    new = {}
    for name, group in groups.items():
        own = {one.name for one in fields(group)} & changes.keys()
        new[name] = replace(group, **{setting: changes.pop(setting) for setting in own})
    assert not changes
    return replace(config, **new)


def settings_of(config: AgentConfig) -> dict[str, object]:
    """Return every setting by its name."""
    groups = [getattr(config, part.name) for part in fields(config) if part.name != "warnings"]
    return {one.name: getattr(group, one.name) for group in groups for one in fields(group)}
