"""A table of the settings file: what is in it is known, and no number in it is infinite."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SettingsTable(BaseModel):
    """Unknown keys are refused; a table does not change once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
