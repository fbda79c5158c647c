"""Teaching with the course: releases, grading, the book, and plans for a class.

- :mod:`labkit.classroom.release`: student, teacher and nbgrader notebooks (``labkit release``)
- :mod:`labkit.classroom.grade`: scores of many notebooks (``labkit grade``)
- :mod:`labkit.classroom.book`: the executed course as HTML (``labkit book``)
- :mod:`labkit.classroom.syllabus`: which chapters fit into so many hours
"""
