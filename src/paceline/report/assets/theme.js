// Colours: as the system has them, light, or dark. Nothing is stored: the page is a file.
"use strict";

const THEMES = ["auto", "light", "dark"];
const THEME_WORDS = { auto: "as the system has them", light: "light", dark: "dark" };

function followTheme(redraw) {
  const button = document.getElementById("theme"), root = document.documentElement;
  button.addEventListener("click", () => {
    root.dataset.theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
    button.setAttribute("aria-label", `Colours: ${THEME_WORDS[root.dataset.theme]}`);
    button.firstElementChild.textContent = { auto: "◐", light: "☀", dark: "☾" }[root.dataset.theme];
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
