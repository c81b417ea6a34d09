"""The standard rule as two functions, which goes the way of any `Rule`."""

from specjax.core.rule import Rule
from specjax.core.rules import _Ratio, _Residual

STANDARD_BY_FUNCTIONS = Rule(_Ratio(), _Residual())
