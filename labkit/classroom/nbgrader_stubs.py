"""labkit's step in ``nbgrader generate_assignment``; needs the extra ``classroom``."""

from __future__ import annotations

from typing import Any

from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_solution


class PutStubs(NbGraderPreprocessor):
    """Puts the course's stub into each solution cell, where nbgrader's own step puts one text for all."""

    def preprocess_cell(self, cell: Any, resources: Any, index: int) -> tuple[Any, Any]:
        """Called by nbgrader for each cell."""
        if is_solution(cell):
            stub = cell.metadata.get("labkit", {}).get("stub")
            if not isinstance(stub, str):
                raise ValueError(f"cell {index} is a solution, and has no stub: make the release again")
            cell.source = stub
            del cell.metadata["labkit"]
        return cell, resources
