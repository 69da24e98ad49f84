"""The methods by name, a module each.

Imports `federation` and what stands below it. Read `fedavg.py` first.
"""

from fastfact.base import plugins
from fastfact.federation.server.strategy import STRATEGIES, make
from fastfact.methods.agnostic_fl import AgnosticFL
from fastfact.methods.clustered_fl import ClusteredFL
from fastfact.methods.factorized_fl import FactorizedFedAvg, FactorizedFLAlpha, FactorizedFLBeta
from fastfact.methods.fedadam import FedAdam
from fastfact.methods.fedala import FedALA
from fastfact.methods.fedamp import FedAMP
from fastfact.methods.fedavg import FedAvg
from fastfact.methods.fedbuff import FedBuff
from fastfact.methods.fedcac import FedCAC
from fastfact.methods.feddecomp import FedDecomp
from fastfact.methods.fedem import FedEM
from fastfact.methods.fedfac import FedFacDynamic, FedFacStatic, FedSplit, RandomSplit
from fastfact.methods.fedfomo import FedFOMO
from fastfact.methods.fedpara import FedPara, PFedPara
from fastfact.methods.fedprox import FedProx
from fastfact.methods.fedrod import FedRoD
from fastfact.methods.flora import FLoRA
from fastfact.methods.hetlora import HetLoRA
from fastfact.methods.lora import FedIT, FedSALoRA, FFALoRA, StandAloneLoRA
from fastfact.methods.matched_lora import MatchedLoRA
from fastfact.methods.moon import MOON
from fastfact.methods.partial import FedBABU, FedBN, FedPer, FedRep, LGFedAvg
from fastfact.methods.per_fedavg import PerFedAvg
from fastfact.methods.pfedgate import PFedGate
from fastfact.methods.pfedme import PFedMe
from fastfact.methods.pfedsd import PFedSD
from fastfact.methods.scaffold import Scaffold
from fastfact.methods.simfed import SimFed
from fastfact.methods.stand_alone import StandAlone
from fastfact.methods.two_models import APFL, Ditto


def names() -> list[str]:
    """The names `Federation(method=)` and `make` know, those of packages that are installed (see `base.plugins`) among
    them."""
    plugins.load()
    return sorted(STRATEGIES)


__all__ = [
    "APFL",
    "MOON",
    "AgnosticFL",
    "ClusteredFL",
    "Ditto",
    "FFALoRA",
    "FLoRA",
    "FactorizedFLAlpha",
    "FactorizedFLBeta",
    "FactorizedFedAvg",
    "FedALA",
    "FedAMP",
    "FedAdam",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedBuff",
    "FedCAC",
    "FedDecomp",
    "FedEM",
    "FedFOMO",
    "FedFacDynamic",
    "FedFacStatic",
    "FedIT",
    "FedPara",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "FedSplit",
    "HetLoRA",
    "LGFedAvg",
    "MatchedLoRA",
    "PFedGate",
    "PFedMe",
    "PFedPara",
    "PFedSD",
    "PerFedAvg",
    "RandomSplit",
    "Scaffold",
    "SimFed",
    "StandAlone",
    "StandAloneLoRA",
    "make",
    "names",
]
