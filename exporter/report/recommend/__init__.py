"""What could be given back, shared or made smaller: suggestions with evidence, money and risk."""

from exporter.report.recommend.advice import recommend
from exporter.report.recommend.evidence import read_evidence
from exporter.report.recommend.reading import Read, read, read_recommendations
from exporter.report.recommend.settings import AdviceSettings
from exporter.report.recommend.values import Advice, DeviceUse, Recommendation

__all__ = [
    "Advice",
    "AdviceSettings",
    "DeviceUse",
    "Read",
    "Recommendation",
    "read",
    "read_evidence",
    "read_recommendations",
    "recommend",
]
