"""Encoders, their parts and heads."""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

encoders: Registry[Any] = Registry("encoder", "discern.encoders")
encoders.register("bert", "discern.models.electra.encoder:BertEncoder")
encoders.register("deberta", "discern.models.deberta.encoder:DebertaEncoder")
encoders.register("modernbert", "discern.models.modernbert.encoder:ModernBertEncoder")
encoders.register("xlnet", "discern.models.xlnet.encoder:XLNetEncoder")
