"use strict";
// Draw the page of the report that is in it.

const PAGES = {
  "ckptool.inspect": inspectPage, "ckptool.inspect-run": runPage, "ckptool.verify": verifyPage, "ckptool.verify-run": verifyRunPage,
  "ckptool.diff": diffPage, "ckptool.bench": benchPage,
};

const report = JSON.parse(document.getElementById("report").textContent);
Object.assign(MEANINGS, report.meanings);
const place = document.getElementById("page");
place.replaceChildren(...PAGES[report.schema.split("/")[0]](report).flat(9).filter(Boolean));
