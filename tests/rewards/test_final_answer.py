"""Final answers of mathematical texts: marks, numbers and sets."""

from __future__ import annotations

from typing import Any

import pytest

from paddlenlp_ext.rewards.final_answer import final_answer, is_correct


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1,000}.", "1,000"),
        (r"first \boxed{3}, then $\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{12", "12"),
        ("9 * 2 = 18\n#### 18", "18"),
        ("<answer> {1, 2} </answer>", "{1, 2}"),
        (r"\boxed{3} and <answer>4</answer>", "4"),
        ("the answer is 18", None),
        ("not a mark: ####18 in ### 18", None),
    ],
)
def test_final_answer_returns_the_content_of_the_last_mark(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1,000}", 1000),
        ("#### 42", "He has 6 * 7 = 42 apples.\n#### 42"),
        ("It costs $1,234.50.", "1234.5"),
        (r"\boxed{\$70,000}", "70000"),
        (r"\boxed{\dfrac{3}{6}}", 0.5),
        ("<answer>-1/2</answer>", "-0.5"),
        (r"\boxed{5\%}", "5"),
        (r"\boxed{1e3}", "1000"),
        ("<answer>42 apples</answer>", 42),
        (r"\boxed{\{2, 1.0\}}", "{1,2}"),
        ("<answer>{1,000, 20}</answer>", [20, 1000]),
        ("<answer>{100,200}</answer>", [100, 200]),
        ("<answer>{1,000, 2,3}</answer>", [1000, 2, 3]),
        ("<answer>{b; a; a}</answer>", ["A", "B"]),
        ("<answer>  New\n York. </answer>", "new york"),
        ("Paris", "paris"),
        (r"\boxed{1{,}234{,}567}", 1234567),
        (r"\boxed{1{,}000 \text{ dollars}}", "1000"),
        (r"\boxed{5 \text{ cm}^2}", 5),
        (r"\boxed{\mathrm{m}^{2} = 25 \text{ m}^{2}}", 25),
        (r"\boxed{\text{Paris}}", "Paris"),
        (r"\boxed{\textbf{(B)}}", "(b)"),
        (r"\boxed{\{\text{red}, \text{blue}\}}", ["blue", "red"]),
        ("18", r"\boxed{\text{18}}"),
    ],
)
def test_is_correct_ignores_the_formatting_of_an_answer(text: str, expected: Any) -> None:
    assert is_correct(text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{41}", 42),
        ("42 and then 43", 42),
        (r"\boxed{1,00}", 100),
        (r"42 \boxed{about}", 42),
        ("<answer>{1, 2, 3}</answer>", "{1, 2}"),
        ("<answer>1</answer>", "{1}"),
        ("<answer>x = 4</answer>", "4x"),
        ("the answer is Paris", "Paris"),
        (r"\boxed{1/0}", 1),
        ("", 1),
        (r"\boxed{\text{Rome}}", "Paris"),
        (r"\boxed{1{,}00}", 100),
        (r"\boxed{\{1{,}2\}}", "12"),
        (r"\boxed{5 \text{ cm}^2}", 2),
        ("9" * 5000, 9),
    ],
)
def test_is_correct_of_another_answer_is_false(text: str, expected: Any) -> None:
    assert not is_correct(text, expected)
