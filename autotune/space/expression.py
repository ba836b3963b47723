"""Conditions in a space file, such as ``plan.tp * plan.pp <= devices and plan.recompute != 'full'``.

A small, safe subset of Python's expressions, evaluated on numbers and strings or on whole numpy columns alike.
"""

from __future__ import annotations

import ast
import difflib
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.errors import UserError


def _is_in(value: Any, options: list[Any]) -> Any:
    """Whether ``value`` equals one of the options, each of which may be a column too."""
    return functools.reduce(np.logical_or, [value == option for option in options], False)


_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    # numpy's where Python's own would differ between numbers and columns: at 0 as a divisor, and in large powers.
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide, ast.Mod: np.mod, ast.Pow: np.float_power,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: _is_in, ast.NotIn: lambda value, options: np.logical_not(_is_in(value, options)),
    ast.And: np.logical_and, ast.Or: np.logical_or,
}  # fmt: skip
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.Not: np.logical_not, ast.USub: operator.neg}


@dataclass(frozen=True)
class Expression:
    """A parsed condition."""

    text: str
    names: frozenset[str]
    """Dotted names it reads."""
    where: str | None = field(default=None, compare=False)
    """File and line, for messages."""

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Evaluate.

        Args:
            values: A scalar or a column of length n for each of ``names``.

        Returns:
            bool, or a bool column of length n.

        Raises:
            UserError: It mixes what can't be mixed, such as a word and a number.
        """
        try:
            with np.errstate(all="ignore"):  # a division by 0 is infinite, or 0 among whole numbers
                return _evaluate(ast.parse(self.text, mode="eval").body, values)
        except (TypeError, OverflowError) as error:
            raise UserError(
                f"the condition {self.text!r} can't be computed: {error}",
                hint="compare numbers with numbers and words with words",
                where=self.where,
            ) from None


def parse_expression(text: Any, known: frozenset[str], *, where: str | None = None) -> Expression:
    """Parse a condition.

    Args:
        text: The condition as written.
        known: Names that may be used.
        where: File and line, for messages.

    Raises:
        UserError: Not an expression of this small language, or an unknown name (with the nearest known one).
    """
    allowed = "numbers, 'words', names such as plan.tp, + - * / // % **, comparisons, in [..], and, or, not"
    if not isinstance(text, str):
        raise UserError(f"a condition must be text, got {text!r}", hint="put it in quotes", where=where)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise UserError(f"not a condition: {text!r}", hint=f"allowed: {allowed}", where=where) from None
    names: set[str] = set()
    for node in _operands(tree, text, allowed, where):
        name = ast.unparse(node)
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            raise UserError(
                f"unknown name '{name}' in the condition {text!r}",
                hint=f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}",
                where=where,
            )
        names.add(name)
    return Expression(text.strip(), frozenset(names), where)


def _fits(op: ast.cmpop, right: ast.expr) -> bool:
    """A list stands to the right of ``in`` and ``not in``, and nowhere else."""
    return type(op) in _BINARY and isinstance(op, ast.In | ast.NotIn) == isinstance(right, ast.List | ast.Tuple)


def _operands(node: ast.AST, text: str, allowed: str, where: str | None) -> list[ast.AST]:
    """The name nodes of an expression; refuses everything outside the language."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        return []
    if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return [node]
    children: list[ast.AST]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        children = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        children = [node.operand]
    elif isinstance(node, ast.BoolOp):
        children = list(node.values)
    elif isinstance(node, ast.Compare) and all(map(_fits, node.ops, node.comparators)):
        children = [node.left]
        for right in node.comparators:
            children += right.elts if isinstance(right, ast.List | ast.Tuple) else [right]
    else:
        raise UserError(f"{ast.unparse(node)!r} is not allowed in a condition", hint=f"allowed: {allowed}", where=where)
    return [operand for child in children for operand in _operands(child, text, allowed, where)]


def _evaluate(node: ast.AST, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name | ast.Attribute):
        return values[ast.unparse(node)]
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(item, values) for item in node.elts]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_evaluate(node.operand, values))
    if isinstance(node, ast.BoolOp):
        operands = [_evaluate(operand, values) for operand in node.values]
        return functools.reduce(_BINARY[type(node.op)], operands)
    assert isinstance(node, ast.Compare)
    left = _evaluate(node.left, values)
    result: Any = True
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(comparator, values)
        result = np.logical_and(result, _BINARY[type(op)](left, right))
        left = right
    return result
