// Typesets the formulas of a page.
for (const element of document.querySelectorAll(".arithmatex")) {
  const displayMode = element.tagName === "DIV";
  // Between \( and \), or \[ and \].
  katex.render(element.textContent.trim().slice(2, -2), element, { displayMode });
}
