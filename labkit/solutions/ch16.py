"""Reference solutions of chapter 16."""

from __future__ import annotations

import math


# A chapter alone is worth nothing: what counts is the cost of it and of all that is still missing.
def fill_hours(minutes, wishes):
    """Chapters that fit, in course order."""
    known = {number: (cost, needs) for number, cost, needs in wishes}

    def missing(number):
        found = {number} - chosen
        for need in known[number][1]:
            found |= missing(need)
        return found

    chosen: set = set()
    for number, _, _ in wishes:
        bundle = missing(number)
        cost = sum(known[one][0] for one in bundle)
        if cost <= minutes:
            chosen |= bundle
            minutes -= cost
    return sorted(chosen)


def sticks(gigabytes, laptops, mb_per_s, minutes):
    """The fewest sticks, or None."""
    copies = math.floor(minutes * 60 / (gigabytes * 1000 / mb_per_s))
    return math.ceil(laptops / copies) if copies else None


# BaseException: SystemExit and KeyboardInterrupt are no Exceptions. And a fresh copy for everybody.
def grade_all(papers, judge, cases):
    """Points by student."""
    points = {}
    for paper in papers:
        try:
            points[paper["student"]] = int(judge(paper["answer"], [list(case) for case in cases]))
        except BaseException:
            points[paper["student"]] = 0
    return points


def odd_exercise(table):
    """The column that tells strong from weak students least."""

    def discrimination(column):
        order = sorted(range(len(table)), key=lambda i: -(sum(table[i]) - table[i][column]))
        half = len(table) // 2
        top = sum(table[i][column] for i in order[:half])
        low = sum(table[i][column] for i in order[-half:])
        return (top - low) / half

    return min(range(len(table[0])), key=discrimination)
