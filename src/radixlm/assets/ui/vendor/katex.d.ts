declare const it: any;
export default it;
