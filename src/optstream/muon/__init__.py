"""Muon: momentum orthogonalised by Newton-Schulz for matrices, AdamW for everything else."""

from optstream.muon.coefficients import COEFFICIENTS
from optstream.muon.groups import muon_groups, muon_table
from optstream.muon.muon import Muon
from optstream.muon.newton_schulz import newton_schulz, newton_schulz_flops
from optstream.muon.update import muon_flops

__all__ = [
    "COEFFICIENTS",
    "Muon",
    "muon_flops",
    "muon_groups",
    "muon_table",
    "newton_schulz",
    "newton_schulz_flops",
]
