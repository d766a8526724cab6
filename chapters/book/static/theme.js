// Tells the figures which theme the page has, also where it follows the system's.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function tell() {
  const theme = document.body.dataset.theme;
  const isDark = theme === "dark" || (theme !== "light" && dark.matches);
  document.documentElement.dataset.jpThemeLight = String(!isDark);
}
document.addEventListener("DOMContentLoaded", () => {
  tell();
  dark.addEventListener("change", tell);
  new MutationObserver(tell).observe(document.body, { attributeFilter: ["data-theme"] });
});
