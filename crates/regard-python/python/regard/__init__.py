from ._regard import *
from . import _regard
