"""Functions to be written: `make` takes signature and docstring, and tests what they give here."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# The arguments of each function's tests; the first two are shown as examples.
CASES: dict[Callable[..., Any], tuple[tuple[Any, ...], ...]] = {}


def cases(*arguments: tuple[Any, ...]) -> Callable[[Function], Function]:
    """Registers a function with the arguments of its tests."""

    def register(function: Function) -> Function:
        CASES[function] = arguments
        return function

    return register


@cases((2, 3), (-1, 1), (0, 0))
def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


@cases((4,), (7,), (0,), (-3,))
def is_even(n: int) -> bool:
    """Return whether n is even."""
    return n % 2 == 0


@cases(("abc",), ("",), ("level",))
def reverse_text(text: str) -> str:
    """Return the text backwards."""
    return text[::-1]


@cases(([3, 9, 2],), ([-5, -2],), ([7],))
def largest(numbers: list[int]) -> int:
    """Return the largest number of a list that is not empty."""
    return max(numbers)


@cases(("banana",), ("rhythm",), ("Orange",), ("",))
def count_vowels(text: str) -> int:
    """Return how many letters of the text are a, e, i, o or u, in either case."""
    return sum(letter in "aeiou" for letter in text.lower())


@cases((5,), (0,), (1,), (10,))
def factorial(n: int) -> int:
    """Return the product of the numbers from 1 to n; 1 for n = 0."""
    return 1 if n == 0 else n * factorial(n - 1)


@cases((7,), (0,), (1,), (20,))
def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number, where the 0th is 0 and the 1st is 1."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


@cases((7,), (9,), (1,), (2,), (97,))
def is_prime(n: int) -> bool:
    """Return whether n is a prime number."""
    return n > 1 and all(n % divisor for divisor in range(2, int(n**0.5) + 1))


@cases(("Level",), ("house",), ("",), ("noon",))
def is_palindrome(text: str) -> bool:
    """Return whether the text reads the same backwards, whatever the case of its letters."""
    return text.lower() == text.lower()[::-1]


@cases(([1, 2, 3, 4],), ([],), ([7, 9],), ([-2, 5, 0],))
def sum_of_even(numbers: list[int]) -> int:
    """Return the sum of the even numbers of a list."""
    return sum(number for number in numbers if number % 2 == 0)


@cases(([3, 1, 3, 2, 1],), ([],), ([5, 5],))
def unique(items: list[int]) -> list[int]:
    """Return the items without repetitions, in the order in which they first occur."""
    return list(dict.fromkeys(items))


@cases(("the cat saw the dog",), ("",), ("a b a b a",))
def word_counts(text: str) -> dict[str, int]:
    """Return how often each word occurs in a text whose words are separated by spaces."""
    words = text.split()
    return {word: words.count(word) for word in words}


@cases((12, 18), (7, 5), (9, 3), (0, 4))
def greatest_common_divisor(a: int, b: int) -> int:
    """Return the largest number that divides both a and b."""
    return a if b == 0 else greatest_common_divisor(b, a % b)


@cases((4, 6), (3, 5), (8, 2))
def least_common_multiple(a: int, b: int) -> int:
    """Return the smallest positive number that both a and b divide."""
    return next(n for n in range(max(a, b), a * b + 1) if n % a == 0 and n % b == 0)


@cases((2024,), (1900,), (2000,), (2023,))
def is_leap_year(year: int) -> bool:
    """Return whether a year of the Gregorian calendar has 366 days."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


@cases((1234,), (0,), (99,))
def digit_sum(n: int) -> int:
    """Return the sum of the decimal digits of n, which is not negative."""
    return sum(map(int, str(n)))


@cases(([[1, 2], [3]],), ([],), ([[], [4]],))
def flatten(lists: list[list[int]]) -> list[int]:
    """Return the items of all lists, one after another, in one list."""
    return [item for one in lists for item in one]


@cases(([1, 2, 3, 4, 5], 2), ([], 3), ([1, 2], 5))
def chunks(items: list[int], size: int) -> list[list[int]]:
    """Split a list into lists of the given size; the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


@cases(([5, 3, 8, 1],), ([2, 2, 1],), ([9, 4],))
def second_largest(numbers: list[int]) -> int:
    """Return the second largest of the different numbers in a list, which are two or more."""
    return sorted(set(numbers))[-2]


@cases(("listen", "silent"), ("apple", "pale"), ("", ""), ("Tea", "eat"))
def are_anagrams(one: str, other: str) -> bool:
    """Return whether two texts consist of the same letters, whatever their case."""
    return sorted(one.lower()) == sorted(other.lower())


@cases(("(a(b)c)",), ("(()",), (")(",), ("",))
def is_balanced(text: str) -> bool:
    """Return whether each parenthesis of the text is closed, and none is closed before it opens."""
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return False
    return depth == 0


@cases(("abc", 1), ("xyz", 3), ("Hi, you", 2), ("abc", 0))
def caesar(text: str, shift: int) -> str:
    """Move each lower-case letter by shift places in the alphabet, from z on to a; keep others."""
    return "".join(
        chr((ord(letter) - 97 + shift) % 26 + 97) if "a" <= letter <= "z" else letter
        for letter in text
    )


@cases((5,), (0,), (8,), (255,))
def to_binary(n: int) -> str:
    """Return n, which is not negative, in binary digits, without a prefix."""
    return f"{n:b}"


@cases(("1011",), ("0",), ("11111111",))
def from_binary(digits: str) -> int:
    """Return the number that these binary digits stand for."""
    return int(digits, 2)


@cases((15,), (9,), (10,), (7,))
def fizz_buzz(n: int) -> str:
    """Return "FizzBuzz" if 15 divides n, else "Fizz" if 3 does, else "Buzz" if 5 does, else n
    in decimal digits."""
    return "Fizz" * (n % 3 == 0) + "Buzz" * (n % 5 == 0) or str(n)


@cases(([1, 3, 5], [2, 4]), ([], [1]), ([1, 1], [1]))
def merge_sorted(one: list[int], other: list[int]) -> list[int]:
    """Return the numbers of two sorted lists in one sorted list."""
    return sorted(one + other)


@cases(([1, 3, 5, 7], 5), ([1, 3], 2), ([], 1), ([4], 4))
def index_of(numbers: list[int], wanted: int) -> int:
    """Return the place of a number in a list without repetitions, from 0; -1 if it is not there."""
    return numbers.index(wanted) if wanted in numbers else -1


@cases(([[1, 2], [3, 4], [5, 6]],), ([[7]],), ([[1, 2, 3]],))
def transpose(rows: list[list[int]]) -> list[list[int]]:
    """Return the columns of a table of rows of equal length."""
    return [list(column) for column in zip(*rows, strict=True)]


@cases(([1, 2, 3],), ([],), ([5, -5, 2],))
def running_sums(numbers: list[int]) -> list[int]:
    """Return, for each place in the list, the sum of the numbers up to and including it."""
    return [sum(numbers[: place + 1]) for place in range(len(numbers))]


@cases(([2, 7, 11, 15], 9), ([1, 2], 7), ([3, 3], 6))
def has_pair(numbers: list[int], total: int) -> bool:
    """Return whether two numbers at different places in the list add up to the total."""
    return any(total - one in numbers[place + 1 :] for place, one in enumerate(numbers))


@cases(("hello big world",), ("",), ("a",))
def capitalise_words(text: str) -> str:
    """Return the text with the first letter of each word, between spaces, in upper case."""
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


@cases(("a fine elephant",), ("one",), ("to be or not",))
def longest_word(text: str) -> str:
    """Return the longest word of a text of words between spaces; the first of equally long ones."""
    return max(text.split(), key=len)


@cases((28,), (12,), (6,), (1,))
def is_perfect(n: int) -> bool:
    """Return whether a positive n equals the sum of its divisors that are smaller than n."""
    return n == sum(divisor for divisor in range(1, n) if n % divisor == 0)


@cases((12,), (7,), (1,))
def divisors(n: int) -> list[int]:
    """Return all positive numbers that divide n, in ascending order."""
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


@cases((60,), (13,), (8,), (97,))
def prime_factors(n: int) -> list[int]:
    """Return the prime factors of n, which is above 1, in ascending order and with repetitions."""
    smallest = next(divisor for divisor in range(2, n + 1) if n % divisor == 0)
    return [smallest] + (prime_factors(n // smallest) if n > smallest else [])


@cases((6,), (1,), (27,))
def collatz_steps(n: int) -> int:
    """Return how many steps lead from n to 1, if an even n becomes n / 2 and an odd one 3 n + 1."""
    return 0 if n == 1 else 1 + collatz_steps(3 * n + 1 if n % 2 else n // 2)


@cases((14,), (9,), (1994,), (40,))
def to_roman(n: int) -> str:
    """Return n, from 1 to 3999, as a Roman numeral in upper case."""
    result = ""
    for value, numeral in zip(
        (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
        ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"),
        strict=True,
    ):
        result += numeral * (n // value)
        n %= value
    return result


@cases(("aaabcc",), ("",), ("abc",))
def run_lengths(text: str) -> list[tuple[str, int]]:
    """Return each run of equal letters as the letter and the run's length, in order."""
    runs: list[tuple[str, int]] = []
    for letter in text:
        length = runs.pop()[1] if runs and runs[-1][0] == letter else 0
        runs.append((letter, length + 1))
    return runs


@cases(({"a": 1, "b": 2},), ({},), ({"x": 7},))
def invert(mapping: dict[str, int]) -> dict[int, str]:
    """Return a dictionary in which the values, all different, are the keys, and the keys values."""
    return {value: key for key, value in mapping.items()}


@cases(([3, 1, 2], 1), ([1, 2, 3, 4], 3), ([1, 2], 5), ([], 2))
def rotate(items: list[int], places: int) -> list[int]:
    """Move each item so many places to the right; what leaves at the end comes in at the start."""
    places = places % len(items) if items else 0
    return items[len(items) - places :] + items[: len(items) - places]


@cases(([-2, 1, -3, 4, -1, 2, 1, -5, 4],), ([-3, -1],), ([5],))
def largest_run_sum(numbers: list[int]) -> int:
    """Return the largest sum of one or more neighbouring numbers of a list."""
    spans = ((i, j) for i in range(len(numbers)) for j in range(i + 1, len(numbers) + 1))
    return max(sum(numbers[i:j]) for i, j in spans)


@cases(("kitten", "sitting"), ("", "ab"), ("same", "same"))
def edit_distance(one: str, other: str) -> int:
    """Return how many letters must be inserted, deleted or replaced, at least, to turn one text
    into the other."""
    if not one or not other:
        return len(one) + len(other)
    if one[0] == other[0]:
        return edit_distance(one[1:], other[1:])
    rests = ((one[1:], other), (one, other[1:]), (one[1:], other[1:]))
    return 1 + min(edit_distance(*rest) for rest in rests)
