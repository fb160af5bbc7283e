"""Encoders, their parts and heads."""

from __future__ import annotations

from discern.registry import Registry

encoders: Registry[type] = Registry("encoder", "discern.encoders")
encoders.register("bert", "discern.model.bert:BertEncoder")
encoders.register("xlnet", "discern.model.xlnet:XLNetEncoder")
